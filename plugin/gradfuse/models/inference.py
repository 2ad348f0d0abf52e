"""onnx's shape inference, in a process of its own: on some models it aborts the process, or does not return.

The process is a worker that is started when first needed and then serves all models of this process. It is a new
interpreter, not a fork: a process with threads, such as those of torch and onnxruntime, cannot be forked safely.
It ends with this process. After a fork the child starts a worker of its own. A frozen application (PyInstaller and the
like) has no interpreter to start, and infers in its own process.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.spawn
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, TypeVar

import onnx

from gradfuse.custom_ops.operator import DOMAIN
from gradfuse.errors import WorkerError
from gradfuse.models import inference_worker
from gradfuse.models.inference_worker import ANSWER, MAGIC, READY, REQUEST

_Answer = TypeVar("_Answer")

SECONDS = 120
"""The time limit of an inference, and of the start of a worker."""
_POLL_SECONDS = 0.5
_END_SECONDS = 5
_LONGEST_SHAPE = 1024
"""More dimensions than any shape has, and more elements than most tensors of sizes have."""
# The exit codes of an interpreter that ends by itself. All others are those of a crash, and so is 0 while at work: it
# is what is known of a process where the system does not keep the exit codes (SIGCHLD is ignored).
_OWN_CODES = (1, 2, 120)


def infer(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """Return a copy of a model with the types and shapes that onnx infers.

    None if onnx cannot do it: it raises an error, ends its process, or takes longer than `SECONDS`. One thread at a
    time.

    Raises:
        WorkerError: the worker fails for a reason that is not the model.
    """
    inferred = _inferred(model, data_prop=False)
    if inferred is None or _is_known(inferred.graph):
        return inferred
    _cut_long_vectors(inferred.graph)
    # The symbols that onnx has just invented would stay.
    for infos, given in (
        (inferred.graph.output, model.graph.output),
        (inferred.graph.value_info, model.graph.value_info),
    ):
        del infos[:]
        infos.extend(given)
    return _inferred(inferred, data_prop=True) or inferred


def _inferred(model: onnx.ModelProto, *, data_prop: bool) -> onnx.ModelProto | None:
    imports = [*model.opset_import, *(entry for function in model.functions for entry in function.opset_import)]
    with_schemas = any(entry.domain == DOMAIN for entry in imports)
    try:
        content = model.SerializeToString()
    except Exception:  # Beyond the limit of a message; protobuf's implementations raise different errors.
        return None
    # The executable of a frozen application is the application: it would start itself again and again.
    in_process = getattr(sys, "frozen", False)
    answer = (inference_worker.infer if in_process else ask)(content, with_schemas, data_prop)
    if answer is None:
        return None
    try:
        return onnx.load_model_from_string(answer)
    except Exception as error:
        raise WorkerError("shape inference: what the worker process answered is no model") from error


def _is_known(graph: onnx.GraphProto) -> bool:
    """Tell whether all values of a graph, which has no other graph in it, have a type and a static shape."""
    known = {info.name for info in _declared(graph) if _static_shape(info) is not None}
    return not _has_graphs(graph) and all(name in known for node in graph.node for name in node.output if name)


def _cut_long_vectors(graph: onnx.GraphProto) -> None:
    """Make long vectors that are computed inputs of a graph.

    onnx tracks values element by element, with an object for each: a vector as long as an image takes gigabytes, and
    does not hold sizes.
    """
    if _has_graphs(graph):
        return
    known = {info.name: info for info in _declared(graph)}
    shapes = {name: shape for name, info in known.items() if (shape := _static_shape(info)) is not None}
    long = {name for name, shape in shapes.items() if len(shape) == 1 and shape[0] > _LONGEST_SHAPE}
    kept: list[onnx.NodeProto] = []
    outputs: list[onnx.ValueInfoProto] = []
    for node in graph.node:
        if long.isdisjoint(node.output) or any(name not in shapes for name in node.output if name):
            kept.append(node)
        else:
            outputs.extend(known[name] for name in node.output if name)
    if outputs:
        del graph.node[:]
        graph.node.extend(kept)
        graph.input.extend(outputs)


def _has_graphs(graph: onnx.GraphProto) -> bool:
    kinds = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
    return any(attribute.type in kinds for node in graph.node for attribute in node.attribute)


def _declared(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    for infos in (graph.input, graph.output, graph.value_info):
        yield from infos


def _static_shape(info: onnx.ValueInfoProto) -> tuple[int, ...] | None:
    """Return the sizes of a tensor whose type and sizes are known."""
    tensor = info.type.tensor_type
    if not tensor.elem_type or not tensor.HasField("shape"):
        return None
    sizes = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim)
    return None if min(sizes, default=0) < 0 else sizes


class _Died(Exception):
    """The worker ended while it had a model, with this exit code."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code


class _Worker:
    """One process, which is ready when this returns.

    Raises:
        WorkerError: it cannot be started.
    """

    def __init__(self) -> None:
        executable = multiprocessing.spawn.get_executable()
        if not executable:
            raise _failure("cannot be started: sys.executable is not known; multiprocessing.set_executable can say it")
        # By its path, so that neither the user's __main__ nor a module of the current folder is imported.
        without_folder = "-P" if sys.version_info >= (3, 11) else "-I"
        command = [os.fsdecode(executable), without_folder, str(inference_worker.__file__), *sys.path]
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                bufsize=0,
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except OSError as error:
            raise _failure(f"cannot be started: {error}") from error
        pipes = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._files: list[IO[bytes]] = [file for file in pipes if file is not None]
        self._talk: threading.Thread | None = None
        with self._stopped_on_error():
            if self._in_time(self._wait_until_ready) is None:
                code = self._process.poll()
                what = f"does not start in {SECONDS} s" if code is None else f"ends at its start with exit code {code}"
                raise _failure(f"{what}{self._last_words()}")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, model: bytes, with_schemas: bool, data_prop: bool) -> bytes | None:
        """Return the model with inferred shapes; None where onnx raised an error or took too long.

        Raises:
            _Died: the process ended.
            WorkerError: the answer is malformed.
        """
        with self._stopped_on_error():
            answer = self._in_time(lambda: self._exchange(model, with_schemas, data_prop))
            if answer is None:
                code = self._process.poll()
                if code is None:
                    self.stop()
                    return None
                raise _Died(code)
        has_shapes, inferred = answer
        return inferred if has_shapes else None

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        if self._talk is not None:
            self._talk.join(_END_SECONDS)
            if self._talk.is_alive():
                return  # It reads from a pipe that a fork of this process holds open: its number must not be reused.
        self._close()

    def forget(self) -> None:
        """Let go of the process of a parent, in its fork."""
        self._close()
        self._process.returncode = 0

    def _close(self) -> None:
        for file in self._files:
            file.close()

    @contextlib.contextmanager
    def _stopped_on_error(self) -> Iterator[None]:
        """Stop the process at any error, also an interrupt: requests and answers are out of step then."""
        try:
            yield
        except BaseException:
            self.stop()
            raise

    def _in_time(self, talk: Callable[[], _Answer | None]) -> _Answer | None:
        """Return what `talk` does; None where the process ends first, or the time does.

        It talks in a thread, as pipes have no time limit that all systems know.
        """
        answers: list[_Answer | None] = []
        errors: list[WorkerError] = []

        def run() -> None:
            try:
                answers.append(talk())
            except WorkerError as error:
                errors.append(error)
            except (OSError, ValueError):
                pass  # The process ended, or was stopped and its pipes are closed.

        self._talk = threading.Thread(target=run, name="gradfuse shape inference", daemon=True)
        try:
            self._talk.start()
        except RuntimeError as error:
            self._talk = None
            raise _failure(f"cannot be talked to: {error}") from error
        end = time.monotonic() + SECONDS
        while self._talk.is_alive() and self.is_alive and time.monotonic() < end:
            self._talk.join(_POLL_SECONDS)
        if not self.is_alive:
            self._talk.join(_END_SECONDS)
        if errors:
            raise errors[0]
        answer = answers[0] if answers else None
        if answer is None and not self._talk.is_alive():
            # It has closed its pipes, and so is about to end.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        return answer

    def _wait_until_ready(self) -> bool | None:
        """Read up to the line that it writes when it is ready: before, what the interpreter imports may print."""
        line = b""
        while character := self._read(1):
            line += character
            if line.endswith(b"\n"):
                if line == READY:
                    return True
                line = b""
        return None

    def _exchange(self, model: bytes, with_schemas: bool, data_prop: bool) -> tuple[bool, bytes] | None:
        stdin = self._files[0]
        for part in (REQUEST.pack(with_schemas, data_prop, len(model)), model):
            left = memoryview(part)
            while left:
                left = left[stdin.write(left) :]
        head = self._read(ANSWER.size)
        if len(head) < ANSWER.size:
            return None
        magic, has_shapes, size = ANSWER.unpack(head)
        if magic != MAGIC:
            raise _failure("gives an answer that makes no sense")
        inferred = self._read(size)
        return (has_shapes, inferred) if len(inferred) == size else None

    def _read(self, size: int) -> bytes:
        """`size` bytes, or fewer where the process ends."""
        parts = []
        while size and (part := self._files[1].read(min(size, 1 << 20))):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _last_words(self) -> str:
        """The last line of what a process that ended wrote to its standard error."""
        if self.is_alive:
            return ""
        lines = self._files[2].read(1 << 16).decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return f": {said[-1]}" if said else ""


def _failure(what: str) -> WorkerError:
    return WorkerError(f"shape inference: the worker process {what}")


class _Workers:
    """The worker of this process, where it has one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        atexit.register(self.stop)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def ask(self, model: bytes, with_schemas: bool, data_prop: bool) -> bytes | None:
        """As `_Worker.ask`, but None where the model makes the worker crash."""
        with self._lock:
            if self._worker is not None and self._worker.is_alive:
                try:
                    return self._worker.ask(model, with_schemas, data_prop)
                except _Died:
                    pass  # By this model, by an earlier one, or killed from outside: a new worker will tell.
            if self._worker is not None:
                self._worker.stop()
            self._worker = _Worker()
            try:
                return self._worker.ask(model, with_schemas, data_prop)
            except _Died as death:
                if death.code in _OWN_CODES:
                    raise _failure(f"ends with exit code {death.code}") from None
                return None

    def stop(self) -> None:
        """End the worker, also while it is at work; the next model gets a new one."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()

    def _forget(self) -> None:
        # A thread that the fork does not have may hold the lock.
        self._lock = threading.Lock()
        if self._worker is not None:
            self._worker.forget()
        self._worker = None


_workers = _Workers()
ask: Callable[[bytes, bool, bool], bytes | None] = _workers.ask
"""What :func:`infer` asks; :func:`inference_worker.infer` in its place works in this process."""
