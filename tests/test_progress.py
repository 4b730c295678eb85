"""What a run says: to the eye whatever it can show, to the file whole lines only."""

import io
import json
import math
import sys
from pathlib import Path

import pytest

from minitrain.progress import Log


def test_what_a_run_writes_survives_its_reader_and_its_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "metrics.jsonl"
    whole = b'{"step": 1}\n{"step": 2}\n'
    file.write_bytes(b"\xff\n{}\n[1]\n" + whole + b'{"step": 3}\n{"st')
    log = Log(tmp_path, 9, 2, bar=False, columns=80)
    assert file.read_bytes() == whole
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    log.validation(2, math.nan)
    assert json.loads(file.read_text().splitlines()[-1]) == {
        "step": 2,
        "validation_loss": None,
    }
    # Killed while it drops lines: the old file is still there, whole.
    before = file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Log(tmp_path, 9, 1, bar=False, columns=80)
    assert file.read_bytes() == before
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    log.say("caf\u00e9")
    assert sys.stdout.buffer.getvalue() == b"caf\\xe9\n"
