"""
Compilation to machine code by numba, for functions that run once per token or more.

Before the first call, no function is compiled and no file is written or deleted; functions that steps of decoding call
are compiled before the first step (`compile_ahead`). Machine code is kept on disk, in the folder that numba chooses:
`NUMBA_CACHE_DIR`, else the package's own, else the user's.
"""

import os
import re
import sys
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, cached_property
from hashlib import blake2b
from pathlib import Path
from pickle import loads
from time import sleep
from typing import Any, BinaryIO

import llvmlite  # type: ignore[import-untyped]
import numba
from numba import types
from numba.core.caching import FunctionCache, NullCache
from numba.core.ccallback import CFunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher
from numba.core.serialize import dumps

from ..log import get_logger, progress_bar

logger = get_logger(__name__)

_OPTIONS = {"nopython": True, "nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as machine code that is kept on disk and runs without the GIL."""
    dispatcher = _Dispatcher(function, targetoptions=_OPTIONS)
    dispatcher.enable_caching()
    return dispatcher


def compiled_for(*arguments: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """
    Return a decorator as `compiled`, for functions that steps of decoding call: `compile_ahead` compiles them before.

    Args:
        arguments (`str`): The types of a call's arguments: numba's short names, with the number of dimensions after
            those of C-contiguous arrays, such as "i8 f4:2". One text for each combination of types that occurs.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        dispatcher: Any = compiled(function)
        dispatcher.given = [tuple(map(_type_of, types_of_call.split())) for types_of_call in arguments]
        _ahead.append(dispatcher)
        return dispatcher

    return decorate


_ahead: list[Any] = []  # functions of `compiled_for` that have not been compiled ahead


def _type_of(text: str) -> types.Type:
    name, _, num_dimensions = text.partition(":")
    kind = getattr(types, name)
    return types.Array(kind, int(num_dimensions), "C") if num_dimensions else kind


def compile_ahead() -> None:
    """
    Compile the functions of `compiled_for` in all imported modules, or load them from the disk, so that no step of
    decoding waits for that. What cannot be compiled is left for those who call it, and get the error.
    """
    if not _ahead:
        return
    with _progress:  # other threads wait until all are there
        while _ahead:
            for arguments in _ahead[0].given:
                with suppress(Exception):  # compilers raise errors of many types
                    _ahead[0].compile(arguments)
            del _ahead[0]  # and not before: who finds none left goes on


def inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """
    Return the function for compiled code alone, as a part of its callers' machine code: compiled once for all of them,
    and optimized within each. Python cannot call it; `compiled(name.py_func)` can be called. It has no environment for
    Python's objects: it must not print, nor raise errors with arguments that are not constants. Inner functions must
    not call one another in a circle.
    """
    return _Inner(function, targetoptions=_OPTIONS | {"no_cpython_wrapper": True}, pipeline_class=_InnerCompiler)


def callback(function: Callable[..., Any]) -> "Callback":
    """Return the function as machine code with an address, for callers in C: to them, `void function(void *)`."""
    return Callback(function)


class Callback:
    """
    Machine code of a function, with an address.

    Args:
        function (`Callable`): A function of one int64 that never raises.
    """

    def __init__(self, function: Callable[..., Any]):
        options = _OPTIONS | {"no_cfunc_wrapper": False}
        self._code = _Code(function, ((types.int64,), types.void), {}, options)
        self._code.enable_caching()

    @cached_property
    def address(self) -> int:
        """Address of the machine code, which is loaded or compiled at the first access."""
        self._code.compile()
        return self._code.address  # type: ignore[return-value]


class _Code(CFunc):
    def enable_caching(self) -> None:
        self._cache: Any = _DiskCache(self.__wrapped__)

    def compile(self) -> None:
        with _progress:
            super().compile()


class _Dispatcher(CPUDispatcher):
    given: Sequence[tuple[types.Type, ...]] = ()  # of arguments, as `compiled_for` has them

    def enable_caching(self) -> None:
        self._cache: Any = _DiskCache(self.py_func)

    def compile(self, sig: Any) -> Any:
        with _progress:
            return super().compile(sig)

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Type a call from compiled code, with all integers as int64: numba would compile every width and constant."""
        return super().get_call_template(tuple(map(_widened, args)), kws)


class _InnerLibrary(JITCodeLibrary):
    """
    Intermediate code of a function that is linked into its callers, and optimized and turned into machine code there
    alone. numba does both for every function by itself as well, which took half of the time.
    """

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class _InnerCompiler(Compiler):
    def compile_extra(self, function: Callable[..., Any]) -> Any:
        self.state.library = _InnerLibrary(self.state.targetctx.codegen(), function.__qualname__)
        self.state.flags.no_compile = True  # no address, which only machine code has
        return super().compile_extra(function)


class _Inner(_Dispatcher):
    def add_overload(self, cres: Any) -> None:
        # numba's own method registers it for calls from Python, too, by its address; callers find it by any object.
        cres = cres._replace(entry_point=object())
        self.targetctx.insert_user_function(cres.entry_point, cres.fndesc, [cres.library])
        self.overloads[tuple(cres.signature.args)] = cres

    def _compile_for_args(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"`{self.py_func.__name__}` can only be called by compiled code.")


def _widened(argument: types.Type) -> types.Type:
    argument = types.unliteral(argument)
    return types.int64 if isinstance(argument, types.Integer) else argument


# --- On disk ---------------------------------------------------------------------------------------------------------


class _DiskCache:
    """numba's cache of a function, with this library's files; its folder is chosen at the function's first call."""

    def __init__(self, function: Callable[..., Any]):
        self._function, self._stamp = function, stamp(Path(function.__code__.co_filename).parent)

    @cached_property
    def _cache(self) -> FunctionCache | NullCache:
        try:
            found = FunctionCache(self._function)
        except RuntimeError:  # no folder is writable
            return NullCache()
        files: Any = _CodeFiles(Path(found.cache_path), self._function, self._stamp)
        found._cache_file = files
        return found

    def load_overload(self, *args: Any) -> Any:
        """Return the code compiled before for these arguments; None makes numba compile it now."""
        code = self._cache.load_overload(*args)
        if code is None:
            files: Any = None if isinstance(self._cache, NullCache) else self._cache._cache_file
            announce(files is not None)
            _progress.show(self._function.__name__)
            if files is not None and _progress.lock(files.lock):
                code = self._cache.load_overload(*args)  # another process may have compiled it meanwhile
        return code

    def save_overload(self, *args: Any) -> None:
        with suppress(OSError):  # such as a full disk
            self._cache.save_overload(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


@cache
def announce(is_kept: bool) -> None:
    """Log, once per process, why the first call takes so long."""
    kept = "once per installation"
    if not is_kept:
        kept = "in every process (no folder can be written; `NUMBA_CACHE_DIR` names one)"
    logger.info(f"Compiling inner loops, for half a minute to one, {kept}.")


class _Progress:
    """
    A bar on a terminal while functions are compiled, and a lock by which processes that start together compile each
    function once; the bar is removed, and the lock is released, after the outermost function. It is entered under
    numba's lock on its compiler, so that one thread at a time changes what it holds.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._bar: Any = None
        self._lock: BinaryIO | None = None
        self._seconds_waited = 0.0

    def __enter__(self) -> None:
        global_compiler_lock.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        try:
            if self._lock is not None and not self._depth:
                lock, self._lock = self._lock, None
                _unlock(lock)
            if self._bar is not None and not self._depth:
                bar, self._bar = self._bar, None
                with suppress(Exception):  # such as a stream that was closed meanwhile
                    bar.close()
        finally:
            global_compiler_lock.release()

    def lock(self, path: Path) -> bool:
        """
        Wait until no other process compiles functions of this module, or for a minute in all, since the other process
        may have been stopped. Return False if it may still do so, or if there are no locks. Within the outermost
        function, which holds one, no other lock is taken: processes cannot wait for one another.
        """
        if self._lock is not None:
            return False
        with suppress(ImportError, OSError):  # Windows, and file systems without locks
            # For its owner alone: other users could keep it for ever.
            self._lock = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
            while not (is_locked := _try_lock(self._lock)) and self._seconds_waited < _MOST_WAITED:
                sleep(_PAUSE)
                self._seconds_waited += _PAUSE
            return is_locked
        return False

    def show(self, name: str) -> None:
        """Count a function that has no code on the disk."""
        with suppress(Exception):  # stderr may be None, closed, or an object without `isatty`
            if self._bar is None and sys.stderr.isatty():
                description = "compiling inner loops, once"
                self._bar = progress_bar(desc=description, unit=" functions", leave=False, mininterval=0)
            if self._bar is not None:
                self._bar.set_postfix_str(name, refresh=False)
                self._bar.update()


_progress = _Progress()
_PAUSE, _MOST_WAITED = 0.02, 60.0  # seconds


def _try_lock(file: BinaryIO) -> bool:
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlock(file: BinaryIO) -> None:
    with suppress(ImportError, OSError), file:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked meanwhile may have the file open


@cache
def stamp(folder: Path) -> str:
    """
    Return a digest of all that machine code of this folder's functions depends on: the compiler, and all sources there
    and here, which may be compiled into it (numba checks the function's own file only). It is taken at import, since
    sources edited later are not the ones that run.
    """
    digest = blake2b(f"{numba.__version__} {llvmlite.__version__}".encode(), digest_size=8)
    for source in [*sorted(Path(__file__).parent.glob("*.py")), *sorted(folder.glob("*.py"))]:
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()


_DIGEST_SIZE = 16


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST_SIZE).digest()


class _CodeFiles:
    """
    One file for every signature and processor that a function was compiled for, named by a digest of all that it
    depends on: processes that write at the same time write the same code, and a file is always whole.
    """

    def __init__(self, folder: Path, function: Callable[..., Any], stamp: str):
        name = re.sub(r"\W", "_", f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}")
        self._folder, self._stamp = folder, stamp
        self.lock = folder / f"{function.__module__.rpartition('.')[2]}.lock"
        self._stem = f"{name}.{sys.implementation.cache_tag}-"

    def _path(self, key: tuple) -> Path:
        digest = blake2b(repr(key).encode(), digest_size=8).hexdigest()
        return self._folder / f"{self._stem}{self._stamp}-{digest}.nbc"

    def load(self, key: tuple) -> Any:
        """Return the data saved for the key, or None."""
        try:
            content = self._path(key).read_bytes()
        except OSError:
            return None
        data = content[_DIGEST_SIZE:]
        return loads(data) if content[:_DIGEST_SIZE] == _digest(data) else None

    def save(self, key: tuple, data: Any) -> None:
        path = self._path(key)
        new = path.with_suffix(f".{uuid.uuid4().hex[:8]}.tmp")
        try:
            content = dumps(data)
            new.write_bytes(_digest(content) + content)
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)
        for other in self._folder.glob(f"{self._stem}*.nbc"):
            if not other.name.startswith(f"{self._stem}{self._stamp}"):
                with suppress(OSError):  # another process was faster
                    other.unlink()
