"""`dspark export`: folders of other layouts with their card, what a target must supply, and the upload."""

import base64
import json
import threading
from collections.abc import Iterator
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from dspark.errors import InputError
from dspark.evaluation.model_card import Licences
from dspark.learning import DrafterSettings
from dspark.model.checkpoints import save_drafter
from dspark.model.config import DraftConfig, Eagle3Config, draft_config
from dspark.model.drafter import new_drafter
from dspark.model.eagle3 import new_eagle3_drafter
from dspark.model.families import LLAMA_FORM, QWEN3_FORM, Form
from dspark.sections import TargetSettings
from dspark.target_files import load_config, load_vocabulary
from jobs.cli import app
from jobs.export import export
from tests.dspark.folders import edited
from tests.tiny import MASK_ID


def drafter_of(folder: Path, target: Path, vocab: int | None = None, remembers: bool = True) -> Path:
    """A drafter for the tiny target, in the folder of a run."""
    settings = TargetSettings(model=str(target))
    config = load_config(settings)
    shape = DrafterSettings.model_validate(
        {"layers": 1, "block": 4, "taps": (0, 2, 4), "mask_token_id": MASK_ID, "markov_rank": 8, "vocab": vocab}
    )
    draft = draft_config(config, shape)
    drafter = new_drafter(draft, 0, None if vocab is None else torch.arange(vocab) + 10)
    facts = {"target": {"name": str(target), "architectures": config.architectures}, "seed": 5} if remembers else {}
    vocabulary = load_vocabulary(settings, torch.device("cpu"), torch.bfloat16)
    state = drafter.state_dict()
    save_drafter(folder / "drafter", state, draft, vocabulary, config, 8, torch.bfloat16, facts)
    return folder / "drafter"


def write(checkpoint: Path, out: Path, to: str, **options: Any) -> Path:
    arguments: dict[str, Any] = {"source": None, "target": None, "push_to_hub": None, "dry_run": False, **options}
    export(checkpoint, out, to, licences=Licences(), **arguments)
    return out


def same(left: Path, right: Path) -> bool:
    files = ("config.json", "model.safetensors")
    return all((left / file).read_bytes() == (right / file).read_bytes() for file in files)


@pytest.mark.parametrize("vocab", [None, 100])
def test_layouts_without_the_whole_head_come_back_bit_for_bit_with_their_target(
    tmp_path: Path, tiny_target: Path, vocab: int | None
) -> None:
    source = drafter_of(tmp_path, tiny_target, vocab)
    there = write(source, tmp_path / "there", "specforge" if vocab is None else "speculators")
    with pytest.raises(InputError, match="name the target with --target"):
        write(there, tmp_path / "back", "deepspec")
    assert not (tmp_path / "back").exists()
    assert same(write(there, tmp_path / "back", "deepspec", target=str(tiny_target)), source)
    assert same(write(source, tmp_path / "again", "deepspec"), source)


def test_the_target_is_named_by_the_checkpoint_or_by_the_user(tmp_path: Path, tiny_target: Path) -> None:
    knows = drafter_of(tmp_path / "a", tiny_target)
    bare = drafter_of(tmp_path / "b", tiny_target, remembers=False)
    with pytest.raises(InputError, match=r"does not remember them.*--target"):
        write(bare, tmp_path / "none", "speculators")
    for out in (
        write(knows, tmp_path / "one", "speculators"),
        write(bare, tmp_path / "two", "speculators", target=str(tiny_target)),
    ):
        named = json.loads((out / "config.json").read_text())["speculators_config"]["verifier"]
        assert named == {"name_or_path": str(tiny_target), "architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(("name", "form"), [("speculators", QWEN3_FORM), ("specforge", LLAMA_FORM)])
def test_an_eagle3_drafter_goes_to_the_engines_layouts_and_back_with_its_target(
    tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str], name: str, form: Form
) -> None:
    settings = TargetSettings(model=str(tiny_target))
    target, vocabulary = load_config(settings), load_vocabulary(settings, torch.device("cpu"), torch.bfloat16)
    shape = DrafterSettings.model_validate({"block": 4, "taps": (0, 2, 4), "mask_token_id": MASK_ID, "vocab": 100})
    sizes = {field.name: getattr(draft_config(target, shape), field.name) for field in fields(DraftConfig)}
    config = Eagle3Config(
        **sizes | {"layers": 1, "form": form}, target_name=str(tiny_target), ttt_length=5, step_loss_decay=0.8
    )
    state = new_eagle3_drafter(config, 0, torch.arange(100) + 10).state_dict()
    source = tmp_path / "source"
    save_drafter(source, state, config, vocabulary, target, None, torch.bfloat16, {})
    there = write(source, tmp_path / "there", name, target=str(tiny_target))
    assert "EAGLE-3, block 4" in " ".join(capsys.readouterr().out.split())
    card = (there / "README.md").read_text()
    assert "kind EAGLE-3" in card and f"`{name}` layout" in card
    assert ("no embedding: the engine takes" in card) == (name == "specforge")
    again = write(there, tmp_path / "again", name, target=str(tiny_target))
    assert same(again, there)
    if form == LLAMA_FORM:
        with pytest.raises(InputError, match=r"the layout deepspec cannot express this drafter: .*Llama form"):
            write(there, tmp_path / "back", "deepspec", target=str(tiny_target))
    else:
        assert same(write(there, tmp_path / "back", "deepspec", target=str(tiny_target)), source)


def test_another_target_is_refused(tmp_path: Path, tiny_target: Path) -> None:
    source = drafter_of(tmp_path, tiny_target)
    head = load_file(source / "model.safetensors")["lm_head.weight"]
    broken = edited(source, tmp_path / "other", lambda _, tensors: tensors.update({"lm_head.weight": head + 1}))
    with pytest.raises(InputError, match=r"lm_head\.weight of the drafter is not the target's"):
        write(broken, tmp_path / "out", "speculators", target=str(tiny_target))


def test_the_card_tells_of_the_run_beside_the_checkpoint(tmp_path: Path, tiny_target: Path) -> None:
    source = drafter_of(tmp_path, tiny_target)
    (tmp_path / "settings.yaml").write_text("name: my-run\n")
    (tmp_path / "result.json").write_text(json.dumps({"held_out": {}, "benchmarks": {}}))
    card = (write(source, tmp_path / "out", "specforge") / "README.md").read_text()
    assert "# out\n" in card and "name: my-run" in card and "| seed | 5 |" in card
    assert str(tiny_target.parent) not in card


def test_the_command_states_licences_and_ends_with_the_folder(tmp_path: Path, tiny_target: Path) -> None:
    source, out = drafter_of(tmp_path, tiny_target), tmp_path / "out"
    options = ["--to", "specforge", "--from", "deepspec", "--license", "mit", "--data-license", "cc0-1.0"]
    done = CliRunner().invoke(app, ["export", str(source), *options, str(out)])
    assert done.exit_code == 0, done.output
    assert done.output.strip().splitlines()[-1].replace("\n", "") == str(out)
    card = (out / "README.md").read_text()
    assert "license: mit" in card and "| the data | cc0-1.0 |" in card and "| the target | not stated |" in card


def test_a_dry_run_says_what_it_would_write_and_writes_nothing(
    tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = drafter_of(tmp_path, tiny_target)
    before = sorted(tmp_path.rglob("*"))
    write(source, tmp_path / "out", "specforge", dry_run=True)
    assert "layout specforge" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("")
    with pytest.raises(InputError, match="exists already"):
        write(source, tmp_path / "taken", "specforge", dry_run=True)


class Hub(ThreadingHTTPServer):
    """A hub on this machine that takes a commit, or refuses to make the repository."""

    def __init__(self, refuses: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.refuses, self.calls, self.files = refuses, list[tuple[str, str | None]](), dict[str, bytes]()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.calls.append((self.path, self.headers.get("Authorization")))
        status, answer = 200, self._answer(body)
        if self.server.refuses:
            status, answer = 403, {}
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.send_header("X-Error-Message", "this token may not write" if self.server.refuses else "")
        self.end_headers()
        self.wfile.write(text)

    def _answer(self, body: bytes) -> dict[str, Any]:
        if self.path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            return {"files": [{**file, "uploadMode": "regular", "shouldIgnore": False} for file in files]}
        if self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return {"commitUrl": f"{self.server.address}/me/drafter/commit/1", "commitOid": "1", "success": True}
        return {"url": f"{self.server.address}/me/drafter", "id": "me/drafter", "sha": "0", "siblings": []}


@pytest.fixture(params=[False, True], ids=["takes", "refuses"])
def hub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(request.param)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    # The client reads its environment once, when it is imported.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_folder_goes_up_as_it_is_or_the_hub_s_reason_is_told(
    hub: Hub, tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = drafter_of(tmp_path, tiny_target), tmp_path / "out"
    if hub.refuses:
        with pytest.raises(InputError, match=r"is written, but was not uploaded to me/drafter: .*may not write"):
            write(source, out, "specforge", push_to_hub="me/drafter")
    else:
        write(source, out, "specforge", push_to_hub="me/drafter")
        assert f"{hub.address}/me/drafter/commit/1" in capsys.readouterr().out
        assert hub.files == {file.name: file.read_bytes() for file in out.iterdir()}
    assert ("/api/repos/create", "Bearer hf_secret") in hub.calls
    assert sorted(file.name for file in out.iterdir()) == ["README.md", "config.json", "model.safetensors"]


def test_without_a_token_nothing_is_written(tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(InputError, match="no token for the hub: set HF_TOKEN"):
        write(drafter_of(tmp_path, tiny_target), tmp_path / "out", "specforge", push_to_hub="me/drafter")
    assert not (tmp_path / "out").exists()
