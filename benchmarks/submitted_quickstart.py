"""The quickstart as a job: submitted, stopped, submitted again with --resume, finished; docs/submitted.md records it.

    ray start --head (free ports, a token) -> dspark submit run QUICKSTART -> a checkpoint -> dspark submit --stop
      -> nothing is left -> dspark submit run QUICKSTART --resume -> exit code 0, every step once

`make submitted-quickstart` takes some minutes: fewer steps and prompts than `make demo`, else the same. Exits with 1
where something is not as it must be.
"""

import json
import platform
import secrets
import sys
import tempfile
import time
from pathlib import Path

from mlflow import MlflowClient

from benchmarks.head_node import Head, Job, head_node

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "submitted.md"
PRESET = "platform/presets/smollm2_135m.yaml"
STEPS, EVERY = 200, 40
SHORTER = (
    f"train.max_steps={STEPS}", f"train.checkpoint_every={EVERY}", "train.log_every=1", "evaluate.prompts_t0=12",
    "evaluate.prompts_t1=3",
)  # fmt: skip
LONGEST_S = 1500.0
_PAGE_TEXT = """\
# A quickstart that was submitted, stopped and taken up

Written by `make submitted-quickstart`; no number here is typed. A head node with 6 logical CPUs and a token of its own
was started on this machine (`ray start --head`), and these were given from the checkout:

```
dspark submit run {preset} output=OUTPUT \\
  {shorter}
dspark submit --stop JOB
dspark submit run {preset} output=OUTPUT \\
  {shorter} \\
  --resume OUTPUT/latest
```

The stop came as soon as the first checkpoint was registered.

| | first job | stop | second job |
| --- | --- | --- | --- |
| seconds | {first_s:.0f} | {stop_s:.0f} | {second_s:.0f} |
| exit code of the command | {first_code} | {stop_code} | {second_code} |
| what Ray says of the job | {first_state} | | {second_state} |
| state of the MLflow run | | {killed} | {finished} |
| processes of the job that are left | | {left} | {left_after} |
| optimizer steps that are recorded | {first_steps} | | {steps}, each once: {once} |

The checkout went along with {upload}. The second job began at step {resumed}, finished all {steps} of {planned} steps,
then measured its drafter: {same} of {of} texts at temperature 0 are those of plain decoding, with an acceptance length
of {length:.3f}. One MLflow run holds both jobs; its loss has {metrics} steps.

Machine: {machine}, Python {python}.
"""


def begin(head: Head, *words: str) -> Job:
    print(f"$ dspark {' '.join(words)}", flush=True)
    return head.dspark(ROOT, *words)


def seconds_of(job: Job) -> float:
    """How long the command took, when it has ended."""
    job.wait(LONGEST_S)
    return time.monotonic() - job.started


def steps_of(folder: Path) -> list[int]:
    """Steps of the records, in the order of the file."""
    return [json.loads(line)["step"] for line in (folder / "history.jsonl").read_text().splitlines()]


def tracked(folder: Path) -> tuple[str, list[int]]:
    """State of the run in MLflow, and the steps of its loss."""
    record = json.loads((folder / "run.json").read_text())
    client = MlflowClient(record["mlflow_uri"])
    history = client.get_metric_history(record["mlflow_run_id"], "loss")
    return client.get_run(record["mlflow_run_id"]).info.status, sorted(metric.step for metric in history)


def measure(head: Head, output: Path) -> dict[str, object]:
    """All that the page says."""
    command = ("submit", "run", PRESET, f"output={output}", *SHORTER)
    first = begin(head, *command)
    first.wait_for_a_checkpoint(output, LONGEST_S)
    folder = (output / "latest").resolve()
    stop = begin(head, "submit", "--stop", first.name)
    stop_s, first_s = seconds_of(stop), seconds_of(first)
    left = head.of_jobs_after(20)
    killed, _ = tracked(folder)
    first_steps = len(steps_of(folder))
    second = begin(head, *command, "--resume", str(folder))
    second_s = seconds_of(second)
    finished, metrics = tracked(folder)
    steps, result = steps_of(folder), json.loads((folder / "result.json").read_text())
    same, of = result["identical"]
    return {
        "first_s": first_s, "stop_s": stop_s, "second_s": second_s, "first_code": first.process.returncode,
        "stop_code": stop.process.returncode, "second_code": second.process.returncode, "first_state": first.state,
        "second_state": second.state, "killed": killed, "finished": finished, "left": len(left),
        "left_after": len(head.of_jobs_after(20)), "first_steps": first_steps, "steps": len(steps),
        "once": "yes" if steps == list(range(1, STEPS + 1)) == metrics else "no", "upload": first.said("upload: "),
        "resumed": second.said("resumed at step "), "planned": STEPS, "same": same, "of": of,
        "length": result["acceptance_length"]["t0"], "metrics": len(metrics),
    }  # fmt: skip


def wrong(found: dict[str, object]) -> list[str]:
    """What is not as it must be."""
    wanted = {
        "first_code": 1, "stop_code": 0, "second_code": 0, "killed": "KILLED", "finished": "FINISHED", "left": 0,
        "left_after": 0, "once": "yes", "second_state": "SUCCEEDED, exit code 0", "same": found["of"],
    }  # fmt: skip
    return [f"{name} is {found[name]!r}, expected {value!r}" for name, value in wanted.items() if found[name] != value]


def main() -> int:
    with (
        tempfile.TemporaryDirectory(prefix="dspark-submitted-") as folder,
        head_node(cpus=6, store_mb=1024, token=secrets.token_hex(32)) as head,
    ):
        found = measure(head, Path(folder) / "runs")
    PAGE.write_text(
        _PAGE_TEXT.format(
            preset=PRESET,
            shorter=" ".join(SHORTER),
            machine=platform.machine(),
            python=platform.python_version(),
            **found,
        )
    )
    faults = wrong(found)
    print("\n".join(faults) or f"all as it must be: {PAGE}")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
