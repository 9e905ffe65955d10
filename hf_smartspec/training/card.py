"""The model card of a trained drafter."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

_KINDS = {
    "medusa": "Medusa heads (arXiv:2401.10774)",
    "eagle3": "EAGLE-3 heads (arXiv:2503.01840)",
    "draft": "A draft model",
    "dflash": "A DFlash block drafter (arXiv:2602.06036)",
    "dspark": "A DSpark block drafter (arXiv:2607.05147)",
}


def write_card(
    folder: Path,
    kind: str,
    target: str,
    accuracy: Sequence[dict[int, float]],
    num_texts: int,
    training: Mapping[str, str],
) -> None:
    """
    Write `README.md`, the folder's model card.

    Args:
        kind (`str`): "medusa", "eagle3", "draft", "dflash" or "dspark".
        target (`str`): Folder or hub id of the model that the drafter drafts for.
        accuracy (sequence of `dict`): For each token of a draft, the share of right ones among the k likeliest, by k.
        num_texts (`int`): Number of held-out texts that this was measured on.
        training (mapping of `str` to `str`): What the drafter has learnt from and how, a row of a table each.
    """
    # A local folder names the target on this machine only.
    base = None if Path(target).exists() else target
    data = ModelCardData(base_model=base, library_name="transformers", tags=["speculative-decoding", kind])
    tops = list(accuracy[0])
    rows = [f"| {place} | {' | '.join(f'{row[top]:.1%}' for top in tops)} |" for place, row in enumerate(accuracy, 1)]
    lines = [
        f"# {_KINDS[kind]} for `{Path(target).name if base is None else target}`",
        "",
        f"How often the target's token is among the likeliest of the drafter, on {num_texts} texts that were held out:",
        "",
        f"| token of the draft | {' | '.join(f'top {top}' for top in tops)} |",
        "|---" * (len(tops) + 1) + "|",
        *rows,
        "",
        "```python",
        "import hf_smartspec",
        "",
        "hf_smartspec.enable(model)",
        f'model.generate(**inputs, assistant="{folder.name}")  # the folder, or its id on the hub',
        "```",
        "",
        "## Training",
        "",
        *("| | |", "|---|---|"),
        *(f"| {name} | {value} |" for name, value in training.items()),
    ]
    text = "\n".join(lines)
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}\n").save(folder / "README.md")
