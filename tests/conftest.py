"""Settings shared by all tests."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings

# kernels compile inside examples, so no deadline; the same examples every time, unless FLEXPRESS_RANDOM_TESTS is set
settings.register_profile(
    "flexpress",
    deadline=None,
    derandomize=not os.environ.get("FLEXPRESS_RANDOM_TESTS"),
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("flexpress")

if "PYTEST_XDIST_WORKER" not in os.environ:
    # caches of their own: no test reads or writes the user's. The processes of one run share them: a kernel is printed and compiled once
    _caches = tempfile.TemporaryDirectory(prefix="flexpress-tests-", ignore_cleanup_errors=True)
    for _name in ("FLEXPRESS_CACHE_DIR", "FLEXPRESS_EXPORTED_DIR", "TRITON_CACHE_DIR"):
        os.environ[_name] = os.path.join(_caches.name, _name.lower())

os.environ.setdefault("FLEXPRESS_CPU", "interpreter")  # tests without a GPU are of Triton's text; those of C++ ask for it
# which kernel computes does not depend on when another is compiled; FLEXPRESS_TEST_WAIT=0: as for users, on a GPU
os.environ["FLEXPRESS_WAIT"] = os.environ.get("FLEXPRESS_TEST_WAIT", "1")

if "PYTEST_XDIST_WORKER" in os.environ:  # processes share the cores: a thread each for torch, which is not imported yet
    os.environ.setdefault("OMP_NUM_THREADS", "1")


PURE = {
    "bert_padding",
    "compute",
    "engine_scheduler",
    "flash_attn_page",
    "golden",
    "grad",
    "house",
    "interval_rules",
    "intervals",
    "kept",
    "package",
    "pages",
    "ranges",
    "recipes",
    "reference",
    "sequences",
    "sums",
    "template_code",
    "turns",
    "types",
}  # files that run no kernel without a `device`


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write the prints in generated/ anew instead of comparing with them")
    parser.addoption(
        "--every-kernel",
        action="store_true",
        help="bring every kernel for GPUs that are not here to the assembler, the other Triton's too (tests/support/tritons.py)",
    )
    parser.addoption(
        "--backend",
        choices=["PORTABLE", "HOPPER"],
        help="on a Hopper GPU: the portable kernels, or those for Hopper wherever they serve, instead of the faster ones",
    )

    parser.addoption("--weights", action="store_true", help="run tests/test_weights.py, whose models `make weights` installs")


def pytest_ignore_collect(collection_path, config):
    return True if collection_path.name == "test_weights.py" and not config.getoption("--weights") else None


@pytest.fixture
def own_directory(tmp_path, monkeypatch):
    """No kernel is printed or compiled yet, on disk or in memory."""
    from flexpress import cache_clear

    monkeypatch.setenv("FLEXPRESS_CACHE_DIR", str(tmp_path / "kernels"))
    cache_clear()
    yield
    cache_clear()


@pytest.fixture(scope="module")
def in_cpp():
    """Tensors on the CPU are computed by kernels in C++. They compile in half the time with -O1; `make test-cpu` has the usual flags."""
    from flexpress import cache_clear

    with mock.patch.dict(os.environ, {"FLEXPRESS_CXXFLAGS": "-O1", **os.environ, "FLEXPRESS_CPU": "cpp"}):
        cache_clear()
        yield
    cache_clear()


@pytest.fixture
def fresh_compiler():
    """torch's compiler knows nothing of other tests, and they nothing of this one."""
    import torch._dynamo  # not before the lines above

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def poisoned_memory():
    """torch.empty gives NaN: what a kernel does not write shows."""
    import torch  # not before the lines above

    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def every_kernel(request) -> bool:
    return request.config.getoption("--every-kernel")


def pytest_configure(config):
    if config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        return  # it runs no test: importing torch would keep the processes that do waiting

    from flexpress.codegen.plan.forward import Options
    from flexpress.codegen.run import backward_kernels, forward_kernels
    from flexpress.inputs import checks

    if config.getoption("--backend") == "PORTABLE":
        checks.DEFAULT = Options(backend="PORTABLE")
    elif config.getoption("--backend") == "HOPPER":
        forward_kernels.worthwhile = backward_kernels.worthwhile = lambda *_: None
    if not config.getoption("--every-kernel") and hasattr(config, "cache"):  # which pytest may be told to do without
        from support import kept

        with contextlib.suppress(OSError):  # where nothing can be written, all is compiled
            config.kept = config.cache.mkdir("compiled")
            kept.keep(config.kept)


def pytest_unconfigure(config):
    if hasattr(config, "kept") and os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
        from support import kept

        kept.limit(config.kept)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(tier_of(item))


def pytest_collection_finish():
    """What is imported stays, and interpreted kernels make objects by the million: looking at all of them as often as Python does by itself
    takes a twentieth of the time of such tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def tier_of(item) -> str:
    """The one of pyproject.toml's markers that a test gets."""
    name = item.path.stem.removeprefix("test_")
    if item.get_closest_marker("gpu"):
        return "gpu"
    if name.endswith("offline"):
        return "offline"
    return "pure" if name in PURE and "device" not in item.fixturenames else "interpreter"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A pure test that runs a kernel fails."""
    if not item.get_closest_marker("pure"):
        return (yield)
    from flexpress.codegen.device.kernel import Kernel

    with mock.patch.object(Kernel, "launch", side_effect=AssertionError("a pure test runs a kernel: take its file out of PURE")):
        return (yield)
