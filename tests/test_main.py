"""The command line's first word: which command, and nothing loaded for the others."""

import os
import subprocess
import sys

import pytest


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    from minitrain.__main__ import main

    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert "train     train a language model" in said
    assert "simulate  predict a training step" in said
    assert main(["trian"]) == 2
    assert "no command is called 'trian'; there is train" in capsys.readouterr().err
    assert main([]) == 2
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "--micro-batch" in capsys.readouterr().out


def test_commands_import_nothing_early() -> None:
    code = "import sys, minitrain.__main__; print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.stdout == "False\n"
