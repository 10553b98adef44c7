"""The command line: flags from the configuration, one line for errors, quiet ends, and help without torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from moestro.checkpoint.synth import TINY, write_checkpoint
from moestro.cli.border import guarded
from moestro.cli.flags import with_flags
from moestro.cli.main import COMMANDS, app
from moestro.engine.config import EngineConfig
from moestro.errors import CapacityError
from moestro.logs import logger
from moestro.server.config import ServerConfig
from moestro.text.tokenizer import Tokenizer

SMALL = ["--max-model-len", "64", "--kernels", "reference", "--kv-memory", "1MB", "--num-threads", "1"]


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Commands set up logging for their process, which here is everybody's."""
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model without tokenizer."""
    return write_checkpoint(TINY["mixtral"], tmp_path_factory.mktemp("tiny"), seed=3)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer of single bytes and a chat template."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    folder = write_checkpoint(TINY["mixtral"], tmp_path_factory.mktemp("chatty"), seed=4)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}|{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def run(*arguments: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)


def test_every_field_is_a_flag_with_its_help_and_default() -> None:
    shown = " ".join(run("serve", "--help").output.split())
    for config in (EngineConfig, ServerConfig):
        for f in fields(config):
            if f.name == "model":
                continue
            assert f"--{f.name.replace('_', '-')}" in shown
            assert " ".join(f.metadata["help"].split()) in shown
    assert "[default: 16]" in shown


def test_flags_become_the_configuration() -> None:
    @dataclass(frozen=True)
    class Options:
        name: str = field(default="a", metadata={"help": "x"})
        some_number: int | None = field(default=None, metadata={"help": "x"})
        enabled: bool = field(default=True, metadata={"help": "x"})

    seen: list[Any] = []

    def command(name: str = "b", *, extra: bool = False, options: Options) -> None:
        seen.append((name, extra, options))

    command.__annotations__["options"] = Options  # the class is local, out of reach of its name
    small = typer.Typer()
    small.command()(with_flags(command))
    assert CliRunner().invoke(small, ["--name", "c", "--some-number", "3", "--no-enabled"]).exit_code == 0
    assert CliRunner().invoke(small, []).exit_code == 0
    assert seen == [("c", False, Options("c", 3, False)), ("b", False, Options("b", None, True))]


def test_help_needs_no_torch() -> None:
    code = "import sys; from moestro.cli.main import app; sys.exit('torch' in sys.modules or 'fastapi' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_module_and_version() -> None:
    done = subprocess.run([sys.executable, "-m", "moestro", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == "moestro 0.1.0\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    assert run(name, "--help").exit_code == 0


def test_inspect_table_and_json(model: Path) -> None:
    facts = json.loads(run("inspect", model, "--json").stdout)
    assert (facts["family"], facts["num_experts"]) == ("mixtral", TINY["mixtral"]["num_local_experts"])
    assert facts == json.loads(run("inspect", model / "config.json", "--json").stdout)
    assert "mixtral" in run("inspect", model).stdout


def test_generate_json_from_token_ids(model: Path) -> None:
    done = run("generate", model, "--prompt-token-ids", "1,2,3", "--max-tokens", "5", "--ignore-eos", "--json", *SMALL)
    result = json.loads(done.stdout)
    assert list(result) == ["text", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens", "tokens_per_s"]
    assert (len(result["token_ids"]), result["finish_reason"], result["prompt_tokens"]) == (5, "length", 3)
    plain = run("generate", model, "--prompt-token-ids", "1,2,3", "--max-tokens", "5", "--ignore-eos", *SMALL)
    assert [int(i) for i in plain.stdout.split()] == result["token_ids"]


def test_generate_from_stdin(chatty: Path) -> None:
    done = run("generate", chatty, "--prompt", "-", "--max-tokens", "3", "--json", *SMALL, stdin="héllo")
    assert json.loads(done.stdout)["prompt_tokens"] == len("héllo".encode())


def test_chat_keeps_and_forgets_the_conversation(chatty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[str] = []
    encode = Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, text, *a, **k: prompts.append(text) or encode(self, text, *a, **k)
    )
    stdin = "one\ntwo\n/reset\nthree\n" + "x" * 100 + "\nfour\n/exit\nnever\n"
    done = run("chat", chatty, "--max-tokens", "2", "--temperature", "0", *SMALL, stdin=stdin)
    assert done.exit_code == 0
    assert prompts[0] == "one|"
    assert prompts[1].startswith("one|")
    assert prompts[1].endswith("|two|")
    assert prompts[2] == "three|"
    assert "/reset makes room" in " ".join(done.stdout.split())
    assert prompts[-1].startswith("three|")
    assert prompts[-1].endswith("|four|")


WRONG = [
    (["inspect", "/nowhere"], 2, "neither a folder"),
    (["generate", "/nowhere", "--prompt", "x"], 2, "neither a folder"),
    (["generate"], 2, "either --prompt or --prompt-token-ids"),
    (["generate", "--prompt-token-ids", "1,x"], 2, "whole numbers"),
    (["generate", "--prompt", "x", "--temperature", "-1"], 2, "temperature=-1.0"),
    (["generate", "--prompt", "x", "--max-num-seqs", "0"], 2, "max_num_seqs=0"),
    (["serve", "--port", "70000"], 2, "port=70000"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), WRONG)
def test_errors_are_one_line(arguments: list[str], code: int, message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == code
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (CapacityError("needs 3 GiB,\n2 GiB are free"), 1, "error: needs 3 GiB, 2 GiB are free\n"),
        (PermissionError(13, "Permission denied", "/x"), 1, "error: /x: Permission denied\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_how_a_command_ends(error: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise error

    with pytest.raises(SystemExit) as caught:
        guarded(command)()
    assert (caught.value.code, capsys.readouterr().err) == (code, message)


def test_text_prompt_without_a_tokenizer_says_what_to_do(model: Path) -> None:
    done = run("generate", model, "--prompt", "x", *SMALL)
    assert done.exit_code == 2
    assert "token ids" in done.stderr


def test_closed_pipe_is_quiet(model: Path) -> None:
    command = [sys.executable, "-m", "moestro", "inspect", str(model)]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_server_says_why_a_model_does_not_load(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    command = [sys.executable, "-m", "moestro", "serve", str(tmp_path), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr


def test_ctrl_c_while_serving(model: Path) -> None:
    command = [sys.executable, "-m", "moestro", "serve", str(model), "--port", "0", *SMALL]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "is served at http://127.0.0.1:" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in stderr
