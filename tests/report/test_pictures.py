"""Pictures of a run are inside its page, byte for byte, and what is no picture is not shown."""

import base64
from pathlib import Path

from assay.report.figures import PNG
from assay.report.page import render_report
from assay.report.run_record import read_run
from tests.report.crafted import a_run
from tests.report.test_page import seen


def test_every_picture_of_a_run_is_on_its_page(tmp_path: Path):
    run, data = a_run(tmp_path / "run"), PNG + bytes(range(256))
    assert "img" not in {tag for tag, _ in seen(render_report(read_run(run))).elements}
    (run / "causal.png").write_bytes(data)
    (run / "mine <b>.png").write_bytes(data + b"!")
    (run / "script.png").write_bytes(b"<svg onload='alert(1)'>")
    page = seen(render_report(read_run(run)))
    images = [attributes for tag, attributes in page.elements if tag == "img"]
    assert [base64.b64decode((one["src"] or "").removeprefix("data:image/png;base64,")) for one in images] == [data, data + b"!"]
    assert (images[0]["alt"] or "").startswith("Causal trace")
    assert images[1]["alt"] == "mine <b>.png"
    assert "script.png is no PNG file" in page.text
    assert "onload" not in page.text
    policy = next(a["content"] for tag, a in page.elements if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    assert "img-src data:;" in (policy or "")
