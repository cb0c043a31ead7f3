"""python -m benchmarks.run."""

import json

from benchmarks import run


def test_rows_of_single_encodings_replace_theirs_and_state_their_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    (tmp_path / "cpu").mkdir()
    earlier = [{"attention": "linear", "encoding": name, "seconds": 1.0} for name in ("a", "b")]
    file = {"part": "table9", "commit": "old", "rows": earlier}
    (tmp_path / "cpu" / "table9.json").write_text(json.dumps(file))
    rows = [{"attention": "linear", "encoding": name, "seconds": 2.0} for name in ("b", "c")]
    found = run.with_earlier("cpu", "table9", rows, {"commit": "new"})
    assert found["commit"] == "old"
    assert found["rows"] == [earlier[0], *({**row, "commit": "new"} for row in rows)]
