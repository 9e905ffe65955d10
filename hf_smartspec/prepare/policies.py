"""Names that `policy=` may have, and the length policies that they stand for."""

from transformers import PreTrainedModel

from ..candidates import TreeCandidateGenerator
from ..candidates.base import saved_name
from ..goodput import LengthPolicy, Roofline, RooflineBudget
from ..target_model.cost.profiling import load_or_profile
from ..target_model.cost.tables import load_table

_TABLE, _ROOFLINE = "table", "roofline"


def check_policy_name(name: str) -> None:
    """Raise `ValueError` for a name that `named_policy` does not know."""
    kind, _, figures = name.partition(":")
    try:
        is_known = name in (_TABLE, _ROOFLINE) or (kind == _ROOFLINE and Roofline.of_text(figures))
    except ValueError:
        is_known = False
    if not is_known:
        raise ValueError(
            "`policy` must be a LengthPolicy, 'table', 'roofline' or 'roofline:FLOPS,BANDWIDTH' with operations and "
            f"bytes per second, such as 'roofline:280e12,0.8e12'; got {name!r}."
        )


def named_policy(name: str, model: PreTrainedModel, source: TreeCandidateGenerator) -> LengthPolicy:
    """
    Return a new policy of this name for a model and a source: see `SmartSpecConfig.policy`.

    Raises:
        ValueError: for an unknown name, a table that was not measured, and a model whose forward cannot be measured.
    """
    check_policy_name(name)
    if name == _TABLE:
        return load_table(model, saved_name(source))
    hidden_size = model.config.get_text_config(decoder=True).hidden_size
    if name != _ROOFLINE:
        roofline = Roofline.of_text(name.partition(":")[2])
        return RooflineBudget(roofline.free_tokens(hidden_size, model.dtype.itemsize))
    try:
        return RooflineBudget.of_profile(load_or_profile(model), hidden_size)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"`policy={name!r}`: the speed of {type(model).__name__} cannot be measured ({error}). Name the "
            "hardware's, as in 'roofline:280e12,0.8e12'."
        ) from error
