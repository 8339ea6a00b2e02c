"""Data that says where it is (`data.stateful`) begins where a checkpoint ends."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from keras_dist import comm
from keras_dist.checkpoint.files import decoded
from keras_dist.checkpoint.saved import Resume, Saved
from keras_dist.data import (
    Mark,
    Reading,
    ShardSpec,
    Source,
    has_division,
    is_arrays,
    is_dealt,
    is_source,
    makes_step,
    passed_over,
    restored,
    skipped,
    track,
)
from keras_dist.report.lines import say
from keras_dist.setup.arguments import KerasArguments, Options


def reopened(
    resume: Resume, given: KerasArguments, options: Options, spec: ShardSpec
) -> tuple[Resume, KerasArguments]:
    """Let such data begin where a checkpoint ends. A collective of all ranks.

    By the state of each rank; where that does not bring the batches back, by reading
    from the beginning, without training on it, to the batch where the training was.
    Where neither leads to the batch that was trained last, the epoch begins again.

    Args:
        resume: The checkpoint to resume from, if any.
        given: The arguments of the fit.
        options: Its options.
        spec: The ranks.

    Returns:
        `resume` with the position that was found, and `given` with a `Source` that is
        read from there; or both as they were, if the data is of another kind.
    """
    source = _source_of(given)
    has_steps = given.steps_per_epoch is not None
    before = resume.position
    passes = 0 if before is None else before.number if has_steps else before.epoch

    def can_track() -> bool:
        if source is None:
            return False
        # A number of batches is a smaller state, and any number of ranks has one.
        is_counted = not has_steps and has_division(source, spec)
        return not is_counted and track(source, spec, passes, has_steps=has_steps)

    # On all ranks: whether their arguments are equal is compared only later.
    if not all(comm.gather_or_raise(can_track)) or source is None:
        return resume, given
    source.is_tracked = True
    given = replace(given, x=source)
    saved = resume.saved
    if saved is None or saved.is_finished:
        return resume, given
    # With `steps_per_epoch`, the beginning of an epoch may be one, too.
    is_within = saved.position.row if has_steps else saved.position.done
    if any(rank.get("data") is None for rank in saved.ranks):
        return resume, given  # within an epoch, it is of other data: an error, later
    if not is_within:
        mark = _own_mark(saved, is_dealt(source, spec))
        if mark is not None and not saved.position.row:
            _on_all(passed_over, source, mark)
        return resume, given
    is_loud = comm.rank() == 0 and given.verbose != 0
    reading: Reading | None
    reading, reason = _found(source, saved, is_dealt(source, spec), is_loud)
    if reading is not None:
        source.forget_begun()
    epoch, done, row = (saved.position.epoch, saved.position.done, saved.position.row)
    if reading is None:
        done = row = 0
        if is_loud:
            say(f"epoch {epoch + 1} begins again: {reason}")
    elif done and not _has_step(source, spec, reading):
        warn_of_lost_epoch(epoch)
        epoch, done, row, reading = epoch + 1, 0, 0, None
    source.resumed = reading
    position = replace(saved.position, epoch=epoch, done=done, row=row)
    return replace(resume, saved=replace(saved, position=position)), given


def _has_step(source: Source, spec: ShardSpec, reading: Reading) -> bool:
    """Tell whether all ranks can make a step of what is left of the epoch."""
    return all(comm.gather_or_raise(lambda: makes_step(source, spec, reading.peek)))


def warn_of_lost_epoch(epoch: int) -> None:
    """Warn on the first rank that nothing is left to train of an epoch."""
    if comm.rank() == 0:
        warnings.warn(
            f"Epoch {epoch + 1} has fewer rows left than there are ranks. These rows "
            "are skipped, and `History` has no entry for the epoch.",
            stacklevel=2,
        )


def _source_of(given: KerasArguments) -> Source | None:
    """Return training data that comes in batches; one rank alone has it as it is."""
    x = given.x
    if isinstance(x, Source):
        return x
    is_whole = given.y is None and given.sample_weight is None
    is_one = is_whole and not is_arrays(x) and is_source(x)
    return Source.of(x, is_tuned=True) if is_one else None


def _found(
    source: Source, saved: Saved, is_dealt_now: bool, is_loud: bool
) -> tuple[Reading | None, str]:
    """Find the position in the data; `None`, and why, where it is not found."""
    mark = _own_mark(saved, is_dealt_now)
    if mark is None:
        return None, (
            "each rank has batches of its own, and there were "
            f"{len(saved.ranks)} ranks or other ones"
        )
    if (reading := _on_all(restored, source, mark)) is not None:
        return reading, ""
    if is_loud and mark.at:
        say(
            f"{mark.row:,} batches of epoch {saved.position.epoch + 1} are read and "
            f"left out: the state of {source.type_name} does not lead there"
        )
    reading = _on_all(skipped, source, mark)
    return reading, "its data has other batches, or another order, than before"


def _own_mark(saved: Saved, is_dealt_now: bool) -> Mark | None:
    """Return the mark that leads this rank to its batches, if there is one."""
    marks = [rank["data"] for rank in saved.ranks]
    if is_dealt_now != marks[0]["is_dealt"]:
        return None
    if len(marks) == comm.size():
        own = marks[comm.rank()]
    elif is_dealt_now:
        own = marks[0]  # equal to the others, or of a pass with other random rows
    else:
        return None
    return _mark_of(own)


def _mark_of(tree: Mapping[str, Any]) -> Mark:
    previous = tree.get("previous")  # not in files of before
    return Mark(
        **{
            **tree,
            "state": decoded(tree["state"]),
            "previous": None if previous is None else _mark_of(previous),
        }
    )


def _on_all(
    work: Callable[[Source, Mark], Reading | None], source: Source, mark: Mark
) -> Reading | None:
    """Return what was found, if something was found on all ranks."""
    found: list[Reading | None] = []

    def has_found() -> bool:
        found.append(work(source, mark))
        return found[0] is not None

    everyone = comm.gather_or_raise(has_found)
    counts_passes = source.has_seeded_passes or source.kind == "stream"
    if any(everyone) and not all(everyone) and counts_passes and mark.is_dealt:
        # A state sets the number of a pass, too: the ranks would differ from then on.
        raise ValueError(
            "The training cannot go on in the middle of an epoch: the state of its "
            f"data fits on some ranks only. Received: a {source.type_name} of another "
            f"pipeline, or without its files, on rank {everyone.index(False)}. Give "
            "all ranks the pipeline and files of before, "
            "or pass an empty folder."
        )
    return found[0] if all(everyone) else None
