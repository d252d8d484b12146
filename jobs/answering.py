"""Conversations to outcomes, by responder actors on Ray or by threads that ask servers."""

from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from threading import Event

from actors.pools import answered
from actors.responder import AnswerTask, outcomes_in, task_table
from dspark.data.conversations import Conversation
from dspark.data.ledger import Outcome
from dspark.decoding.answers import Asking, answer_tasks
from dspark.decoding.endpoint import Endpoint, Unreachable
from dspark.errors import InputError
from dspark.target_files import load_tokenizer
from jobs.preparing import Work
from jobs.session import ray_session

# So many conversations in a row without an answer, and nobody is there.
_GIVE_UP_AFTER = 20


def by_actors(work: Work, rows: Sequence[Conversation], lengths: Sequence[int]) -> Generator[list[Outcome], None, None]:
    """Outcomes as the actors finish their tasks; `lengths` are those of the first prompts."""
    settings, prepare = work.settings, work.settings.prepare
    task = AnswerTask(settings.target, prepare, settings.data.thinking, work.sampling, work.max_length)
    booked = {"CPU": prepare.actors * prepare.cpus, "GPU": prepare.actors * prepare.gpus}
    tables = [task_table([rows[place] for place in places]) for places in answer_tasks(lengths, prepare.task_rows)]
    with ray_session(settings, booked), closing(answered(task, tables, settings.ray.target_labels)) as results:
        for table in results:
            yield outcomes_in(table)


def by_endpoint(
    work: Work, rows: Sequence[Conversation], unreachable: dict[str, str]
) -> Generator[list[Outcome], None, None]:
    """Outcomes as the servers give them. Conversations that no server answered go to `unreachable`, by digest.

    Raises:
        InputError: the servers refuse the settings, or many conversations in a row got no answer.
    """
    settings, prepare = work.settings, work.settings.prepare
    asking = Asking(work.making.renderer, work.sampling, prepare.max_tokens, work.max_length)
    ends = [str(token) for token in load_tokenizer(settings.target).all_special_tokens]
    stopped = Event()
    endpoint = Endpoint(prepare.endpoint, prepare.endpoint.model or settings.target.model, asking, ends, stopped.wait)
    waiting = iter(rows)
    running: dict[Future[Outcome], Conversation] = {}
    in_a_row = 0
    wrong: InputError | None = None
    with ThreadPoolExecutor(work.parallel) as pool:
        try:
            while True:
                # No more are handed over than are worked on, so that a stop leaves little behind.
                for row in (row for _, row in zip(range(work.parallel - len(running)), waiting, strict=False)):
                    running[pool.submit(endpoint.answer, row)] = row
                if not running:
                    return
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                outcomes = []
                for future in done:
                    row = running.pop(future)
                    try:
                        outcomes.append(future.result())
                        in_a_row = 0
                    except Unreachable as error:
                        unreachable[row.digest] = str(error)
                        in_a_row += 1
                    except InputError as error:
                        wrong = error
                yield outcomes
                if wrong is not None:
                    raise wrong
                if in_a_row >= _GIVE_UP_AFTER:
                    raise InputError(
                        f"{in_a_row} conversations in a row got {unreachable[row.digest]}: look at the servers, then "
                        f"go on with --resume {work.folder}"
                    )
        finally:
            stopped.set()
            for future in running:
                future.cancel()
