"""Pictures of a run (causal trace, heat-map, gain by document), inside the page byte for byte."""

import base64
from pathlib import Path

from assay.errors import ArtifactError
from assay.report.html import Html, joined, lead, remarks, section, tag
from assay.store import durable

_LIMIT = 8 << 20  # bytes of one picture
PNG = b"\x89PNG\r\n\x1a\n"
CAPTIONS = {"causal.png": "Causal trace: how much of the answer each layer brings back, by token; the numbers are in causal.json",
            "trace.png": "Trace: where two models part, by layer and site",
            "ttt.png": "Bits per byte that test-time training saved, document by document; the numbers are in ttt.json"}


def pictures_section(folder: Path) -> Html | None:
    """Every PNG file in the run's own folder; nothing where there is none, and a sentence for what is named so and is none."""
    shown: list[Html] = []
    wrong: list[str] = []
    for path in sorted(folder.glob("*.png")):
        try:
            data = durable.read_file(path, limit=_LIMIT)
        except ArtifactError as error:
            wrong.append(f"{path.name}: {error}")
            continue
        if data.startswith(PNG):
            shown.append(figure(path.name, data))
        else:
            wrong.append(f"{path.name} is no PNG file and is not shown")
    if not shown and not wrong:
        return None
    return section("pictures", "Pictures", lead("As the run drew them; the numbers that they show lie beside them."), joined(shown),
                   remarks(wrong))


def figure(name: str, data: bytes) -> Html:
    caption = CAPTIONS.get(name, name)
    source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return tag("figure", tag("img", src=source, alt=caption), tag("figcaption", caption), class_="scroll picture", tabindex="0")
