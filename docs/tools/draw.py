"""
The pictures of docs/pictures: `python docs/tools/draw.py` writes them anew; a test says so where one is out of date.

Each has a panel of its own and colours for dark surroundings, so that it is legible on any page.
"""

from html import escape
from pathlib import Path

PICTURES = Path(__file__).parents[1] / "pictures"
_STYLE = """
text { font: 14px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", Helvetica, Arial, sans-serif; fill: #24292f; }
.title { font-size: 17px; font-weight: 600; } .note { fill: #57606a; font-size: 13px; } .small { font-size: 12px; }
.panel { fill: #f6f8fa; stroke: #d0d7de; } .box { fill: #ffffff; stroke: #57606a; }
.dark { fill: #24292f; stroke: #24292f; } .good { fill: #dafbe1; stroke: #1a7f37; }
.bad { fill: #ffebe9; stroke: #cf222e; } .seen { fill: #ddf4ff; stroke: #0969da; }
.blank { fill: none; stroke: #d0d7de; } .line { stroke: #57606a; fill: none; }
.mark { stroke: #0969da; fill: none; } .dark + text { fill: #ffffff; } .tip { fill: #57606a; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; }
.note { fill: #9198a1; } .panel { fill: #151b23; stroke: #3d444d; } .box { fill: #0d1117; stroke: #9198a1; }
.dark { fill: #e6edf3; stroke: #e6edf3; } .dark + text { fill: #0d1117; } .good { fill: #12361f; stroke: #3fb950; }
.bad { fill: #3c1618; stroke: #f85149; } .seen { fill: #0c2d52; stroke: #4493f8; } .blank { stroke: #3d444d; }
.line { stroke: #9198a1; } .mark { stroke: #4493f8; } .tip { fill: #9198a1; }
}
"""


class Picture:
    """An SVG that grows; sizes in pixels."""

    def __init__(self, width: int, height: int, says: str):
        self.width, self.height, self.says = width, height, says
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, text: str = "", kind: str = "box") -> None:
        shape = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" class="{kind}" stroke-width="1.5"'
        self.parts.append(f"<rect {shape}/>")
        if text:
            self.text(x + width / 2, y + height / 2 + 5, text, "middle")

    def text(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>')

    def line(self, *points: tuple[float, float], kind: str = "line", tip: bool = False, dashed: bool = False) -> None:
        path = " ".join(f"{'L' if at else 'M'}{x:g} {y:g}" for at, (x, y) in enumerate(points))
        more = (' marker-end="url(#tip)"' if tip else "") + (' stroke-dasharray="5 4"' if dashed else "")
        self.parts.append(f'<path d="{path}" class="{kind}" stroke-width="1.5"{more}/>')

    def svg(self) -> str:
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        tip = '<path d="M0 0 L8 4 L0 8 Z" class="tip"/>'
        marker = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"'
        panel = f'x="1" y="1" width="{self.width - 2}" height="{self.height - 2}" rx="12" stroke-width="1.5"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(self.says)}">'
        defs = f'<defs><marker id="tip" {marker}>{tip}</marker></defs>'
        return "\n".join(
            [head, f"<style>{_STYLE}</style>", defs, f'<rect {panel} class="panel"/>', *self.parts, "</svg>\n"]
        )


def tree() -> Picture:
    """A draft tree with probabilities, and which path came true."""
    picture = Picture(860, 345, "A draft tree: nodes have the probability that the target picks them")
    picture.text(28, 40, "A draft tree", kind="title")
    picture.text(28, 62, "above a node: probability given its parent; below: product along the path, a_n", kind="note")
    nodes = {  # token, parent, probability, x, y
        "a": ("a", None, 0.8, 190, 110), "b": ("sum", None, 0.1, 190, 215), "c": ("+", "a", 0.9, 340, 110),
        "d": (",", "a", 0.1, 340, 192), "e": ("b", "c", 0.9, 490, 110), "f": ("1", "c", 0.05, 490, 192),
        "g": ("(", "b", 0.6, 340, 275),
    }  # fmt: skip
    picture.box(28, 110, 90, 34, "return", "dark")
    path = {}
    for name, (token, parent, prob, x, y) in nodes.items():
        left = nodes[parent][3] + 80 if parent else 118
        middle = nodes[parent][4] + 17 if parent else 127
        picture.line((left, middle), (x, y + 17))
        path[name] = prob * (path[parent] if parent else 1.0)
        picture.box(x, y, 80, 34, token, "good" if name in "ac" else "box")
        picture.text(x + 40, y - 5, f"{prob:g}", "middle", "note small")
        picture.text(x + 40, y + 49, f"{path[name]:.2g}", "middle", "small")
    picture.box(640, 110, 190, 34, "target: a, +, c", "seen")
    picture.text(640, 166, "Two nodes come true (green),", kind="note")
    picture.text(640, 185, "and the target's own token", kind="note")
    picture.text(640, 204, "“c” is committed behind them:", kind="note")
    picture.text(640, 223, "three tokens in one forward.", kind="note")
    return picture


def auction() -> Picture:
    """The nodes of two rows, sorted; where the price of time cuts."""
    picture = Picture(860, 330, "The auction: all rows' nodes sorted by path probability; the best prefix is verified")
    picture.text(28, 40, "The auction", kind="title")
    picture.text(28, 62, "nodes of all rows, sorted by path probability; each column is a node", kind="note")
    bids = [(1, "a", 0.8), (1, "+", 0.72), (1, "b", 0.65), (2, "sat", 0.6), (2, "on", 0.42), (2, "ran", 0.3),
            (1, "sum", 0.1), (1, ",", 0.08), (1, "(", 0.06), (2, "off", 0.04)]  # fmt: skip
    price, bottom, scale = 0.25, 270, 200
    for at, (row, token, bid) in enumerate(bids):
        x = 52 + at * 58
        picture.box(x, bottom - bid * scale, 46, bid * scale, kind="good" if bid > price else "bad")
        picture.text(x + 23, bottom - bid * scale - 7, f"{bid:g}", "middle", "small")
        picture.text(x + 23, bottom + 18, token, "middle", "small")
        picture.text(x + 23, bottom + 36, f"row {row}", "middle", "note small")
    level = bottom - price * scale
    picture.line((44, level), (630, level), kind="mark", dashed=True)
    picture.text(640, level - 8, "what a node's time is worth:")
    picture.text(640, level + 12, "tokens per second elsewhere", kind="note")
    picture.text(640, level + 30, "times seconds of a further node", kind="note")
    picture.text(640, 110, "Green is verified, red is not.")
    picture.text(640, 131, "A fuller batch makes a node", kind="note")
    picture.text(640, 149, "dearer: the line rises.", kind="note")
    return picture


def packed() -> Picture:
    """One packed forward: who attends to whom."""
    picture = Picture(860, 400, "One packed forward: two rows' tokens, and what each may attend to")
    picture.text(28, 40, "One packed forward", kind="title")
    picture.text(28, 62, "two rows, end to end; each token sees its row's text and its own ancestors", kind="note")
    tokens = [
        ("return", 1, None),
        ("a", 1, 0),
        ("+", 1, 1),
        ("sum", 1, 0),
        ("cat", 2, None),
        ("sat", 2, 4),
        ("ran", 2, 4),
    ]
    left, top, cell = 318, 112, 32
    columns = [("text of row 1", 1), ("text of row 2", 2)]
    for at, (name, row) in enumerate(columns):
        x = left + at * 110
        picture.text(x + 50, top - 12, name, "middle", "note small")
        for line, (_, own, _) in enumerate(tokens):
            picture.box(x, top + line * cell, 100, cell - 6, kind="seen" if own == row else "blank")
    for line, (token, row, parent) in enumerate(tokens):
        y = top + line * cell
        picture.box(100, y, 80, cell - 6, token, "dark" if parent is None else "box")
        picture.text(190, y + 18, f"position {'n m'.split()[row - 1]}{_depth(tokens, line)}", kind="note small")
        picture.text(42, y + 18, f"row {row}", kind="note small")
        x = left + 230 + line * 40
        picture.text(x + 17, top - 12, token, "middle", "note small")
        seen, node = set(), line
        while node is not None:
            seen.add(node)
            node = tokens[node][2]
        for column in range(len(tokens)):
            picture.box(left + 230 + column * 40, y, 34, cell - 6, kind="seen" if column in seen else "blank")
    below = (
        "Siblings share a position. Projections, MLP and head cost exactly these seven tokens: nothing is padded there."
    )
    picture.text(28, 366, below, kind="note")
    return picture


def _depth(tokens: list, line: int) -> str:
    depth, node = 0, tokens[line][2]
    while node is not None:
        depth, node = depth + 1, tokens[node][2]
    return f" + {depth}" if depth else ""


def step() -> Picture:
    """One step, end to end."""
    picture = Picture(860, 250, "One step: propose trees, select, one forward, verify, commit, observe")
    picture.text(28, 40, "One step", kind="title")
    picture.text(28, 62, "of a batch; requests join and leave between steps", kind="note")
    stages = [
        ("propose", "sources draft", "a tree per row"), ("select", "the auction picks", "what pays"),
        ("forward", "target, once,", "all rows packed"), ("verify", "nodes that are the", "target's own token"),
        ("commit", "text, keys", "and values"),
    ]  # fmt: skip
    for at, (name, first, second) in enumerate(stages):
        x = 28 + at * 164
        picture.box(x, 92, 140, 40, name, "seen" if name == "forward" else "box")
        picture.text(x + 70, 152, first, "middle", "note small")
        picture.text(x + 70, 169, second, "middle", "note small")
        if at:
            picture.line((x - 24, 112), (x - 2, 112), tip=True)
    picture.line((754, 178), (754, 214), (98, 214), (98, 178), tip=True)
    picture.text(
        426, 208, "observe: sources see the committed tokens, and what their drafts were worth", "middle", "small"
    )
    picture.text(426, 234, "next step", "middle", "note small")
    return picture


def online() -> Picture:
    """Drafters that learn while they serve."""
    picture = Picture(860, 300, "Online learning: what the target said of a request teaches the drafter, in idle time")
    picture.text(28, 40, "Learning while serving", kind="title")
    picture.text(28, 62, "the target decides about every token: outputs never depend on what was learnt", kind="note")
    picture.box(28, 100, 150, 44, "requests")
    picture.box(250, 100, 170, 44, "draft and verify", "seen")
    picture.box(500, 100, 150, 44, "samples")
    picture.box(500, 216, 150, 44, "update")
    picture.box(250, 216, 170, 44, "shadow drafts")
    picture.line((178, 122), (248, 122), tip=True)
    picture.line((420, 122), (498, 122), tip=True)
    picture.line((575, 144), (575, 214), tip=True)
    picture.line((500, 238), (422, 238), tip=True)
    picture.line((335, 216), (335, 146), tip=True)
    picture.text(664, 116, "tokens, and the target's", kind="note small")
    picture.text(664, 133, "likeliest (bounded bytes)", kind="note small")
    picture.text(664, 232, "in a thread of low priority,", kind="note small")
    picture.text(664, 249, "while nothing runs", kind="note small")
    picture.text(345, 186, "new weights, if no worse", kind="note small")
    picture.text(238, 232, "texts that were", "end", "note small")
    picture.text(238, 249, "not learnt", "end", "note small")
    return picture


DRAWN = {"step": step, "tree": tree, "auction": auction, "packed": packed, "online": online}


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for name, draw in DRAWN.items():
        (PICTURES / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
