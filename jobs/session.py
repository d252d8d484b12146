"""The Ray that a command runs on: a local one for this job, or a cluster that is joined."""

import logging
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import ray
from ray.data import DataContext

from actors.placement import check_trainer_places, target_place
from dspark.config import Settings
from dspark.errors import InputError

# Ray Data's own small tasks run beside the actors and need room of their own.
_DATA_CPUS = 2
_CONNECT_TIMEOUT_S = 10
_STARTS = 4


def needed_cpus(settings: Settings, targets: int) -> float:
    """Logical CPUs that the job books over training and evaluation, with that many targets."""
    train, evaluate = settings.train, settings.evaluate
    readers = 0 if settings.data.source == "live" else settings.cache.readers
    training = train.workers * train.cpus + targets * settings.targets.cpus + readers
    if evaluate.every is not None:
        training += evaluate.cpus
    return max(training, evaluate.widest_pool * evaluate.cpus) + _DATA_CPUS


def needed_gpus(settings: Settings, targets: int) -> float:
    """GPUs that the job books, with that many targets."""
    train, evaluate = settings.train, settings.evaluate
    training = train.workers * train.gpus + targets * settings.targets.gpus
    if evaluate.every is not None:
        training += evaluate.gpus
    return max(training, evaluate.widest_pool * evaluate.gpus)


def target_actors(settings: Settings) -> int:
    """Most actors that hold a target while the drafter is trained.

    From a cache none does, but for the one that captures the validation rows, or that `drafter.init=target` asks for
    bigrams, before the first step.
    """
    if settings.data.source == "cache":
        asked = settings.drafter.kind == "dspark" and settings.drafter.init == "target"
        return int(asked or settings.validation.every is not None)
    return settings.targets.max_actors or settings.targets.actors


@contextmanager
def ray_session(settings: Settings, booked: Mapping[str, float] | None = None) -> Iterator[None]:
    """Ray for the length of a command; one that the process has already joined is used as it is and left alone.

    `booked` holds the CPUs and GPUs that the command's actors need; None: those of training and evaluation.

    Raises:
        InputError: the cluster cannot be reached, is too small or has no node for a part, or the dashboard's port is
            taken.
    """
    mine = not ray.is_initialized()
    # A cluster that is joined may get the nodes for more targets while the run goes on.
    targets = target_actors(settings)
    if settings.ray.address != "local":
        targets = min(targets, settings.targets.actors)
    needed = {"CPU": needed_cpus(settings, targets), "GPU": needed_gpus(settings, targets)}
    if booked is not None:
        needed = {**booked, "CPU": booked["CPU"] + _DATA_CPUS}
    if mine:
        _start(settings, needed["CPU"])
    try:
        with quiet_ray():
            _check_room(needed, ray.cluster_resources())
            if booked is None:
                check_trainer_places(settings, ray.nodes())
                if targets:
                    target_place("targets", settings.targets, settings.ray.target_labels)
            yield
    finally:
        if mine:
            ray.shutdown()


@contextmanager
def quiet_ray() -> Iterator[None]:
    """Ray's libraries say no more than warnings: the commands show their own bar, one for the whole stage."""
    for name in ("ray.data", "ray.train", "ray.tune"):
        logging.getLogger(name).setLevel(logging.WARNING)
    context = DataContext.get_current()
    bars = context.enable_progress_bars
    context.enable_progress_bars = False
    try:
        yield
    finally:
        context.enable_progress_bars = bars


def _start(settings: Settings, cpus: float) -> None:
    wanted = settings.ray
    if wanted.address == "local":
        if wanted.dashboard_port is not None:
            _check_port(wanted.dashboard_port)
        # RAY_AUTH_MODE stays as it is: unset, Ray makes a token for this cluster, since its ports listen on every
        # interface and anyone near could run code without one. Ray reads the variable before this module can set it.
        start_ray(
            num_cpus=int(-(-cpus // 1)),
            object_store_memory=wanted.object_store_mb * 2**20,
            include_dashboard=wanted.dashboard_port is not None,
            dashboard_host="127.0.0.1",
            dashboard_port=wanted.dashboard_port,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
        return
    _check_answers(wanted.address)
    try:
        ray.init(address=wanted.address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _no_answer(wanted.address, str(error).splitlines()[0]) from error


def start_ray(**options: Any) -> None:
    """A Ray of this machine, with options of `ray.init`.

    Ray gives its own processes 30 seconds to start, which a machine that is busy with other work may not have: then
    they are ended, and started again.
    """
    driver = psutil.Process()
    for attempt in range(_STARTS):
        others = driver.children(recursive=True)
        try:
            ray.init(address="local", **options)
            return
        except Exception as error:  # Ray raises no kind of its own
            if "timed out during startup" not in str(error) or attempt == _STARTS - 1:
                raise
        ray.shutdown()
        for child in driver.children(recursive=True):
            if child not in others:
                with suppress(psutil.NoSuchProcess):
                    child.kill()


def _check_answers(address: str) -> None:
    """Ray itself waits for minutes at an address where nobody listens."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise _no_answer(address, str(error)) from error


def _no_answer(address: str, reason: str) -> InputError:
    return InputError(
        f"ray.address={address!r}: no Ray cluster answers there ({reason}). Start one with `ray start --head`, "
        "correct the address, or set ray.address=local"
    )


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise InputError(
                f"ray.dashboard_port={port} is in use on this machine: choose another, or null for no dashboard"
            ) from error


def _check_room(needed: Mapping[str, float], found: Mapping[str, float]) -> None:
    # Ray would wait for ever for a node that may never join.
    for resource, count in needed.items():
        if count > found.get(resource, 0.0):
            raise InputError(
                f"this job books {count:g} logical {resource}s, the Ray cluster has {found.get(resource, 0):g}: lower "
                "the actors or workers of its sections (or their cpus/gpus), or join a larger cluster"
            )
