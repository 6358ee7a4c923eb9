"""Kernels that are compiled by processes beside this one, and what serves calls meanwhile."""

from __future__ import annotations

import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from unittest import mock

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget

from flexpress import create_block_mask, explain, flex_attention, precompile, wait_for_kernels
from flexpress.codegen import registry
from flexpress.codegen.device import binary, cache, compiler, cpp_compiler, kernel, memory, stages, workers
from flexpress.codegen.device import cores as cores_module
from flexpress.codegen.device.cuda import CudaError
from flexpress.codegen.plan.forward import Options
from flexpress.codegen.run import block_grid, forward, forward_kernels, launch, meanwhile, status_lists
from flexpress.codegen.run.preview import compilation
from flexpress.codegen.text.render import render
from flexpress.commands.recipes import make
from flexpress.mods import alibi, alibi_slopes, causal, sliding_window
from support.dense import dense_attention, relative_error
from support.fake_hopper import Variant, pass_for_hopper

TARGET = GPUTarget("cuda", 90, 32)
LAYOUT, OPTIONS = (*[(torch.bfloat16, True)] * 3,), {"num_warps": 4, "num_stages": 2}


def wait_until(true, seconds=90.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def nothing_under_way() -> bool:
    return workers.POOL.is_idle and not any(thread.name == "flexpress-begin" for thread in threading.enumerate())


def request_of(spec, signature, constants, options=OPTIONS, **changes) -> stages.Request:
    printed = cache.store(render(spec), spec)
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    target = (TARGET.backend, TARGET.arch, TARGET.warp_size)
    made = stages.Request(
        printed.source,
        str(printed.path),
        spec.template,
        signature,
        constants,
        aligned,
        target,
        options,
        compiler.assembler_for(TARGET),
        dict(os.environ),
    )
    return made._replace(**changes)


@pytest.fixture(scope="module")
def request_():
    """A small kernel's: the portable forward one."""
    made = compilation("sm_90", *make("causal"), "bfloat16", head_dim=16)
    compiled = made.compile("ttgir")
    constants = {(i,): made.constants[p.name] for i, p in enumerate(made.spec.parameters) if p.type == "constexpr"}
    return request_of(made.spec, compiled.signature, constants)


def ended(request, pool=None) -> workers.Job:
    job = (pool or workers.POOL).submit(workers.Job(request, lambda *found: found))
    wait_until(lambda: job.over)
    return job


def test_the_code_is_that_of_this_process(request_):
    metadata, code, extension = ended(request_).found
    function = getattr(stages.load_module(request_.path, request_.text), request_.entry)
    source = stages.source_class(function)(function, request_.signature, request_.constants, request_.attributes)
    here, expected, kind = compiler.compile_source(source, TARGET, OPTIONS)
    assert (metadata, code, extension) == (stages.metadata_text(here), expected, kind)


def test_what_is_wrong_is_said(request_):
    job = ended(request_._replace(entry="no_such_kernel"))
    assert job.found is None and "no_such_kernel" in job.why
    assert "SyntaxError" in ended(request_._replace(text="def (")).why
    assert ended(request_).found  # by the same process


def test_a_process_that_is_killed(request_, monkeypatch):
    """The one that forks, and a fork."""
    pool = workers.Pool()
    jobs = [pool.submit(workers.Job(request_, lambda *found: found)) for _ in range(2)]
    pool.process.kill()
    wait_until(lambda: all(job.over for job in jobs))
    assert not any(job.found for job in jobs) and "has ended" in jobs[0].why and pool.is_idle
    assert ended(request_, pool).found
    wait_until(lambda: not children_of(pool.process.pid))
    job = pool.submit(workers.Job(request_, lambda *found: found))
    forks = []
    wait_until(lambda: forks.extend(children_of(pool.process.pid)) or forks)
    os.kill(forks[0], signal.SIGKILL)
    wait_until(lambda: job.over)
    assert job.found is None and "has ended with -9" in job.why
    assert ended(request_, pool).found
    pool.process.kill()


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


@pytest.mark.parametrize(
    "executable, why",
    [("/no/such/python", "FileNotFoundError"), (None, "is no Python"), ("/bin/true", "is no Python"), ("python", "has ended")],
)
def test_no_process_can_be_started(request_, monkeypatch, tmp_path, executable, why):
    """It is tried once. From then on calls wait."""
    if executable == "python":  # and does not do as one
        executable = tmp_path / "python3"
        executable.symlink_to("/bin/true")
    monkeypatch.setattr(sys, "executable", executable and str(executable))
    pool = workers.Pool()
    job = ended(request_, pool)
    assert job.found is None and why in job.why and pool.fails and pool.is_idle
    monkeypatch.setattr(subprocess, "Popen", None)
    assert ended(request_, pool).why == pool.fails
    monkeypatch.setitem(workers.SETTING, "waits", False)
    assert not meanwhile.must_wait(torch.device("cpu"), Options(), False)
    monkeypatch.setattr(workers, "POOL", pool)
    assert meanwhile.must_wait(torch.device("cpu"), Options(), False)


def test_a_worker_loads_neither_torch_nor_the_package(request_):
    pool = workers.Pool()
    assert ended(request_, pool).found
    with open(f"/proc/{pool.process.pid}/maps") as file:
        loaded = file.read()
    assert "libtriton" in loaded and "libtorch" not in loaded
    pool.process.kill()


def test_file_numbers_may_be_large(request_):
    """As in a server with a thousand connections."""
    usual, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2048, usual), most))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        pool = workers.Pool()
        assert ended(request_, pool).found and pool.process.stdout.fileno() > 1024
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (usual, most))
        pool.process.kill()


def test_a_job_that_has_not_begun_is_taken_back(request_, monkeypatch):
    monkeypatch.setattr(workers, "limit", lambda: 1)
    pool = workers.Pool()
    first, second, third = (pool.submit(workers.Job(request_, lambda *found: found)) for _ in range(3))
    assert not pool.withdraw(first) and pool.withdraw(second) and not pool.withdraw(second)
    wait_until(lambda: third.over)
    assert first.found and third.found and second.over and not second.found and pool.is_idle and not pool.withdraw(third)
    pool.process.kill()


def test_as_many_as_cores_allow_and_none_when_idle(request_, monkeypatch):
    monkeypatch.setattr(workers, "limit", lambda: 2)
    monkeypatch.setattr(workers, "IDLE", 0.3)
    pool = workers.Pool()
    jobs = [pool.submit(workers.Job(request_, lambda *found: len(found))) for _ in range(5)]
    assert not pool.has_room and len(pool.running) == 2
    most = []
    wait_until(lambda: most.append(len(pool.running)) or all(job.over for job in jobs))
    assert [job.found for job in jobs] == [3] * 5 and max(most) == 2
    process = pool.process
    wait_until(lambda: pool.process is None and process.poll() is not None)
    assert pool.has_room and ended(request_, pool).found
    wait_until(lambda: pool.process is None)


def test_a_worker_ends_with_the_process_that_asks(request_):
    program = (
        "import pickle, sys, os\n"
        "from flexpress.codegen.device import workers\n"
        "request = pickle.load(sys.stdin.buffer)\n"
        "job = workers.POOL.submit(workers.Job(request, lambda *found: 1))\n"
        "job.wait()\n"
        "print(workers.POOL.process.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(request_), capture_output=True, check=True)
    pid = int(done.stdout)

    wait_until(lambda: not is_running(pid))


def is_running(pid: int, kill=os.kill) -> bool:
    try:
        kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"  # nobody waits for it here
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_a_forked_child_waits_for_nobody(request_):
    job = workers.POOL.submit(workers.Job(request_, lambda *found: found))
    pid = os.fork()
    if pid == 0:
        fine = job.over and job.found is None and workers.POOL.is_idle and not workers.POOL.process
        os._exit(0 if fine else 1)
    assert os.waitpid(pid, 0)[1] == 0
    wait_until(lambda: job.over)
    assert job.found


def test_a_program_ends_while_kernels_are_compiled(request_, tmp_path):
    """At once, without a word, and leaves neither a process nor a file."""
    program = (
        "import glob, pickle, sys, time\n"
        "from flexpress.codegen.device import workers\n"
        "request = pickle.load(sys.stdin.buffer)\n"
        "[workers.POOL.submit(workers.Job(request, lambda *found: 1)) for _ in range(4)]\n"
        "while not glob.glob(sys.argv[1] + '/flexpress-*/flexpress-*/kernel.ptx'):\n"
        "    time.sleep(0.01)\n"
        "print(workers.POOL.process.pid, time.time(), flush=True)\n"
    )
    slow = tmp_path / "assembler"  # it takes for ever, so that kernels are in the middle of it
    slow.write_text("#!/bin/sh\nsleep 100\n")
    slow.chmod(0o755)
    (place := tmp_path / "tmp").mkdir()
    asked = pickle.dumps(request_._replace(assembler=(str(slow), "12.9")))
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", program, place],
        input=asked,
        capture_output=True,
        timeout=60,
        env=os.environ | {"TMPDIR": str(place)},
    )
    pid, at = done.stdout.split()
    assert done.returncode == 0 and done.stderr == b""
    assert time.time() - float(at) < 5 and list(place.iterdir()) == []
    wait_until(lambda: not is_running(int(pid), os.killpg))


def test_it_ends_where_a_fork_keeps_the_pipe(request_, monkeypatch):
    """A fork that Python does not know of, as its parent ends."""
    program = (
        "import ctypes, os, sys, time\n"
        "from flexpress.codegen.device import stages, workers\n"
        "import pathlib; place = pathlib.Path(sys.argv[1], 'stages.py')\n"
        "place.write_text(pathlib.Path(stages.__file__).read_text().replace('_LOOK_AGAIN = 5.0', '_LOOK_AGAIN = 0.1'))\n"
        "stages.__file__ = str(place)\n"
        "workers.POOL.start()\n"
        "while not workers.POOL._answers: time.sleep(0.01)\n"
        "print(workers.POOL.process.pid, flush=True)\n"
        "if ctypes.CDLL(None).fork() == 0:\n"
        "    os.closerange(1, 3)\n"
        "    os.read(int(sys.argv[2]), 1)\n"
        "os._exit(0)\n"
    )
    held, ours = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-c", program, folder, str(held)], capture_output=True, pass_fds=[held], timeout=60)
        wait_until(lambda: not is_running(int(done.stdout)))
    os.close(ours)
    os.close(held)


@pytest.mark.parametrize(
    "quota, ranks, bound, cores", [("max 100000", 0, 8, 8), ("250000 100000", 0, 8, 2.5), ("max 100000", 4, 8, 2), ("max 100000", 4, 2, 2)]
)
def test_cores_are_those_of_a_container_and_shared_with_other_ranks(tmp_path, monkeypatch, quota, ranks, bound, cores):
    """Bound to 2 of 8, a rank has these alone."""
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(cores_module, "_GROUPS", tmp_path)
    monkeypatch.setattr(cores_module.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(cores_module.os, "sched_getaffinity", lambda _: range(bound), raising=False)
    monkeypatch.setattr(cores_module, "_free", lambda: 1 << 40)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks) if ranks else "")
    cores_module._quota.cache_clear()
    assert cores_module.cores() == cores and workers.limit() == max(1, int(0.75 * cores))
    with workers.POOL.all_awaited():
        assert workers.limit() == int(cores)
    monkeypatch.setattr(cores_module, "_free", lambda: 1 << 20)
    assert workers.limit() == 1
    cores_module._quota.cache_clear()


@pytest.fixture
def hopper(own_directory, monkeypatch):
    """A Hopper GPU whose kernels for Hopper are compiled beside, and nothing is launched: the names of kernels that would be."""
    launched = []

    class Noted(Variant):
        def launch(self, *args):
            launched.append(re.split("_d64|_[0-9a-f]{12}$", self.name)[0])

        def launch_plain(self, *args):
            self.launch()

    wait_until(nothing_under_way)
    pass_for_hopper(monkeypatch, Noted, beside=True)
    monkeypatch.setitem(workers.SETTING, "waits", False)
    monkeypatch.setattr(forward_kernels, "worthwhile", lambda *_: None)
    monkeypatch.setattr(binary, "current_target", lambda: TARGET)
    name_of, names = binary._name_of, {}
    monkeypatch.setattr(binary, "_name_of", lambda stem, *rest: names.setdefault(name_of(stem, *rest), stem) and name_of(stem, *rest))
    made = kernel.Kernel._compiled_beside
    monkeypatch.setattr(kernel.Kernel, "_compiled_beside", lambda self, *args: _loaded(self, made, args, Noted))
    yield launched
    wait_until(nothing_under_way)
    registry.clear()


class Soon(workers.Pool):
    """Compiles nothing, beside this thread."""

    def submit(self, job):
        self.running[id(job)] = job
        threading.Thread(target=self._end, args=(job,)).start()
        return job

    def _end(self, job):
        time.sleep(0.3)
        job.end((b"{}", b"code", "cubin"))
        del self.running[id(job)]


@pytest.fixture
def soon(hopper, monkeypatch):
    """What would be launched, where compiling takes no long time."""
    monkeypatch.setattr(workers, "POOL", Soon())
    return hopper


def _loaded(self, made, args, variant):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(binary, "Binary", lambda *_: variant(self.path.stem))
        return made(self, *args)


def problem(grad=True):
    return [torch.randn(1, 2, 256, 64, dtype=torch.bfloat16, requires_grad=grad) for _ in range(3)]


def test_portable_kernels_serve_until_those_for_hopper_are_there(hopper, monkeypatch):
    """Forward and backward change together."""
    q, k, v = problem()
    end, held = workers.Job.end, {name: threading.Event() for name in ("hopper_forward", "hopper_backward")}

    def end_later(job, answer):
        if job.request and job.request.entry in held:
            threading.Thread(target=lambda: held[job.request.entry].wait(60) and end(job, answer)).start()
        else:
            end(job, answer)

    def called() -> list[str]:
        hopper.clear()
        flex_attention(q, k, v).sum().backward()
        return list(hopper)

    monkeypatch.setattr(workers.Job, "end", end_later)
    portable = ["forward", "backward_delta", "backward_dkv", "backward_dq"]
    assert called() == portable
    said = explain(q, k, v).splitlines()
    assert [line[:16] for line in said[:2]] == ["forward   HOPPER", "backward  HOPPER"]
    assert all(line.endswith("; being compiled, a portable one serves meanwhile") for line in said[:2])
    wait_until(nothing_under_way)
    assert called() == portable
    (entry,) = forward._meanwhile.values()
    held["hopper_forward"].set()
    wait_until(lambda: [job.over for job in entry.jobs if job.request and job.request.entry == "hopper_forward"] == [True])
    assert called() == portable and "being compiled" in explain(q, k, v)
    held["hopper_backward"].set()
    wait_until(lambda: entry.over)
    assert "compiled" not in explain(q, k, v)
    assert called() == ["hopper_forward", "backward_delta", "hopper_backward"]


def test_with_cores_to_spare_a_call_compiles_nothing_here(hopper, monkeypatch):
    """While a thread prints."""
    monkeypatch.setattr(workers, "limit", lambda: 4)
    workers.POOL.start()
    wait_until(lambda: workers.POOL._answers)
    begin, begun = binary.begin, []

    def noted(printed, entry, *rest):
        begun.append(entry)
        wait_until(lambda: "forward" in begun)
        return begin(printed, entry, *rest)

    monkeypatch.setattr(binary, "begin", noted)
    monkeypatch.setattr(binary, "obtain", None)
    flex_attention(*problem(grad=False))
    assert hopper == ["forward"] and sorted(begun) == ["forward", "hopper_forward"]


def test_a_masks_second_kernel_is_compiled_beside_the_first(hopper, monkeypatch):
    """And is waited for. That of the next mask is there."""
    for module in (block_grid, status_lists):
        monkeypatch.setattr(module, "backend_of", lambda _: "cuda")
    monkeypatch.setattr(cpp_compiler, "refusal", lambda *_: "a GPU's masks are asked for")
    obtain, obtained = binary.obtain, []

    def obtained_now(name, *rest):
        jobs = [job.request.path for job in (*workers.POOL.running.values(), *workers.POOL.waiting)]
        obtained.append((name.split("_")[1], ["block_lists" in path for path in jobs]))
        return obtain(name, *rest)

    monkeypatch.setattr(binary, "obtain", obtained_now)
    create_block_mask(causal, None, None, 1000, 1000, "cpu")
    create_block_mask(sliding_window(30), None, None, 1000, 1000, "cpu")
    assert obtained == [("status", [True]), ("status", [])]
    assert [name.split("_")[1] for name in hopper] == ["status", "lists"] * 2
    monkeypatch.setitem(workers.SETTING, "waits", True)
    registry.clear()
    create_block_mask(causal, None, None, 1000, 1000, "cpu")
    assert obtained[2:] == [("status", []), ("lists", [])]


def test_a_tensor_that_lies_elsewhere_has_kernels_of_its_own(soon):
    """One that is captured, and begins at no multiple of 16 bytes: forward and backward wait for nobody again."""
    q, k, v = problem()
    for slopes in (torch.ones(2), torch.ones(3)[1:]):
        for names in (["forward_alibi", "backward_dq_alibi"], ["hopper_forward_alibi", "hopper_backward_alibi"]):
            soon.clear()
            flex_attention(q, k, v, alibi(slopes)).sum().backward()
            assert [soon[0], soon[-1]] == names
            wait_until(nothing_under_way)


@pytest.mark.parametrize("mask", ["none", "block mask", "mask_mod"])
def test_the_thread_that_begins_touches_no_device(soon, monkeypatch, mask):
    """Its caller may capture a CUDA graph by then. It launches nothing, and all tensors that it makes are on meta."""
    made = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            made.extend(t.device.type for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor))
            return result

    monkeypatch.setattr(memory, "_ALLOCATE", {})  # that way no mode sees
    monkeypatch.setattr(meanwhile, "on", lambda _: Noted())
    q, k, v = problem()
    how = {"mask_mod": causal} if mask == "mask_mod" else {}
    if mask == "block mask":
        how["block_mask"] = create_block_mask(causal, None, None, 256, 256, "cpu")
    slopes = torch.ones(2, requires_grad=True)
    flex_attention(q, k, v, alibi(slopes), **how).sum().backward()
    assert wait_for_kernels(60) and nothing_under_way()
    assert "meta" in made and set(made) == {"meta"}
    monkeypatch.setattr(binary, "begin", None)  # the kernels are those of a call
    monkeypatch.setattr(binary, "obtain", None)
    flex_attention(q, k, v, alibi(slopes), **how).sum().backward()
    assert soon[-1].startswith("hopper_backward_alibi")


@pytest.mark.parametrize("fails", ["forward", "backward_dq"])
def test_a_call_waits_where_what_serves_meanwhile_fails(soon, monkeypatch, fails):
    """Whatever is wrong with it. What it raises is what the kernels say that serve in the end."""
    obtain = binary.obtain

    def failing(name, layout, constants, options, *rest):
        if name.startswith(fails) and options["num_warps"] == 8:
            raise ValueError(name)
        return obtain(name, layout, constants, options, *rest)

    monkeypatch.setattr(binary, "obtain", failing)
    monkeypatch.setattr(workers.POOL, "submit", lambda job: job.end("") or job)
    q, k, v = problem()
    flex_attention(q, k, v).sum().backward()
    portable = ["backward_delta", "backward_dkv"]
    assert soon == (
        ["hopper_forward", *portable, "backward_dq"] if fails == "forward" else ["forward", *portable, "backward_delta", "hopper_backward"]
    )
    monkeypatch.setattr(binary, "obtain", mock.Mock(side_effect=ValueError("all")))
    with pytest.raises(ValueError, match="all"):
        flex_attention(q.float(), k.float(), v.float(), mask_mod=causal)


def test_a_call_waits_where_no_thread_can_be_started(soon, monkeypatch):
    """And none that was begun comes back."""
    start = threading.Thread.start

    def refused(thread):
        if thread.name == "flexpress-begin":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    q, k, v = problem()
    flex_attention(q, k, v).sum().backward()
    assert soon == ["hopper_forward", "backward_delta", "hopper_backward"] and nothing_under_way()


def test_what_the_kernels_say_that_serve_in_the_end_is_raised(soon, monkeypatch):
    """By the first call after they failed beside."""
    obtain = binary.obtain

    def failing(name, *rest):
        if "backward" in name and not name.startswith("backward_d"):
            raise CudaError(name)
        return obtain(name, *rest)

    monkeypatch.setattr(binary, "begin", mock.Mock(side_effect=ValueError("not beside")))
    monkeypatch.setattr(binary, "obtain", failing)
    monkeypatch.setattr(
        launch, "usable", lambda kernel, args, device, _, waits, warps: kernel.variant(args, device, (), waits=waits, num_warps=warps)
    )
    q, k, v = problem()
    flex_attention(q, k, v).sum().backward()
    assert wait_for_kernels(60)
    with pytest.raises(CudaError, match="hopper_backward"):
        flex_attention(q, k, v).sum().backward()


def test_whoever_must_have_the_same_bits_waits(hopper):
    q, k, v = problem(grad=False)
    flex_attention(q, k, v)
    flex_attention(q, k, v, deterministic=True)  # while it is being compiled
    assert hopper == ["forward", "hopper_forward"]
    flex_attention(q, k, v)
    assert hopper[2:] == ["hopper_forward"]


def test_a_backend_that_is_named_is_waited_for(hopper):
    flex_attention(*problem(grad=False), kernel_options={"BACKEND": "HOPPER"})
    assert hopper == ["hopper_forward"]


def test_precompile_waits(soon):
    q, k, v = problem()
    precompile(q, k, v, backward=True)
    assert not soon and nothing_under_way()


def test_precompile_waits_for_masks_too(soon, monkeypatch):
    """Of its own thread alone. Later calls compile nothing."""
    module, waits = sys.modules["flexpress.precompile"], []
    call = module.bound

    def noted(*args, **more):
        waits.append(meanwhile.must_wait(torch.device("cpu"), Options(), False))
        return call(*args, **more)

    monkeypatch.setattr(module, "bound", noted)
    q, k, v = problem(grad=False)
    precompile(q, k, v, mask_mod=causal)
    precompile([{"query": q, "key": k, "value": v, "mask_mod": causal}])
    assert waits == [True, True] and not meanwhile.must_wait(torch.device("cpu"), Options(), False)


def test_precompile_begins_all_kernels_at_once(soon, monkeypatch):
    """Of the forward and the backward pass. Nothing is compiled twice, and a call finds all of it."""
    order, submit, end, all_begun = [], workers.POOL.submit, workers.Job.end, threading.Event()

    def submitted(job):
        order.append(job.request.entry)
        if len(order) == 3:
            all_begun.set()
        return submit(job)

    def ended(job, answer):
        all_begun.wait(60.0)  # a busy machine may be done with the first before the last has begun
        if job.request:
            order.append("over")
        end(job, answer)

    monkeypatch.setattr(workers.POOL, "submit", submitted)
    monkeypatch.setattr(workers.Job, "end", ended)
    monkeypatch.setattr(binary, "obtain", None)
    q, k, v = problem()
    precompile(q, k, v, alibi(torch.ones(2)), mask_mod=causal, backward=True)
    assert order == ["hopper_forward", "backward_delta", "hopper_backward", *["over"] * 3]
    flex_attention(q, k, v, alibi(torch.ones(2)), mask_mod=causal).sum().backward()
    assert len(order) == 6 and [name.split("_alibi")[0] for name in soon] == ["hopper_forward", "backward_delta", "hopper_backward"]


def test_one_that_did_not_compile_beside_is_compiled_here(hopper, monkeypatch):
    """There it says what is wrong, or compiles."""
    monkeypatch.setattr(stages, "__file__", "/no/such/file.py")  # no worker can load it
    monkeypatch.setattr(workers, "POOL", workers.Pool())
    q, k, v = problem(grad=False)
    flex_attention(q, k, v)
    wait_until(nothing_under_way)
    flex_attention(q, k, v)
    assert hopper[-1] == "hopper_forward" and len(hopper) == 2


def test_what_takes_the_place_of_a_kernel_that_spills_is_not_waited_for(soon, monkeypatch):
    """The portable kernel that stays has another tile than the one that serves meanwhile."""
    loaded = Variant.__init__
    monkeypatch.setattr(Variant, "__init__", lambda self, name="", local=0: loaded(self, name, 10**6 if name.startswith("hopper") else 0))
    made, begin = [], binary.begin
    monkeypatch.setattr(binary, "begin", lambda *args: made.append((args[1], args[3], args[4]["num_warps"])) or begin(*args))
    q, k, v = problem(grad=False)
    for awaited in ("HOPPER", "PORTABLE"):
        flex_attention(q, k, v)
        assert soon[-1] == "forward" and len(forward._meanwhile) == 1
        assert [found.awaited[0] for found in forward._meanwhile.values()] == [awaited]
        wait_until(nothing_under_way)
    flex_attention(q, k, v)
    assert not forward._meanwhile and soon == ["forward"] * 3
    assert [entry for entry, _, _ in made] == ["hopper_forward", "forward"] and made[1][2] == 4


@pytest.mark.parametrize("device, capturing, deterministic, setting", [("cuda", True, 0, 0), ("cpu", False, 1, 0), ("cpu", False, 0, 1)])
def test_must_wait(monkeypatch, device, capturing, deterministic, setting):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setitem(workers.SETTING, "waits", False)
    assert not meanwhile.must_wait(torch.device(device), Options(), False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setitem(workers.SETTING, "waits", bool(setting))
    assert meanwhile.must_wait(torch.device(device), Options(), bool(deterministic))
    monkeypatch.setitem(workers.SETTING, "waits", False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    torch.use_deterministic_algorithms(True)
    try:
        assert meanwhile.must_wait(torch.device(device), Options(), False)
    finally:
        torch.use_deterministic_algorithms(False)


def test_threads_do_not_wait_for_each_others_compiles(hopper, monkeypatch):
    """While one compiles here, another has its kernel compiled beside."""
    inside, leave, begun = threading.Event(), threading.Event(), []
    monkeypatch.setitem(workers.SETTING, "waits", True)
    begin = binary.begin
    monkeypatch.setattr(binary, "begin", lambda *args: begun.append(args[1]) or begin(*args))

    def compiling():
        inside.set()
        leave.wait(60)

    thread = threading.Thread(target=lambda: compiler._compiler.run(compiling))
    thread.start()
    inside.wait(60)
    try:
        flex_attention(*problem(grad=False))
    finally:
        leave.set()
        thread.join()
    assert begun == ["hopper_forward"] and hopper == ["hopper_forward"]


@pytest.mark.parametrize("wanted, capturing", [(True, False), (False, False), (True, True)])
def test_backward_kernels_are_begun_with_the_forward_pass(soon, monkeypatch, wanted, capturing):
    """Also where calls wait. Not where no gradient is wanted, nor inside a graph's capture, as block lists may have to be made."""
    begun = []
    monkeypatch.setitem(workers.SETTING, "waits", True)
    monkeypatch.setattr(forward, "is_capturing", lambda _: capturing)
    begin = binary.begin
    monkeypatch.setattr(binary, "begin", lambda *args: begun.append(args[1]) or begin(*args))
    q, k, v = problem(grad=wanted)
    out = flex_attention(q, k, v)
    wait_until(nothing_under_way)
    expected = ["backward_delta", "hopper_backward"] if wanted and not capturing else []
    assert [name for name in begun if name != "hopper_forward"] == expected
    flex_attention(q, k, v)  # is no new kind
    wait_until(nothing_under_way)
    if wanted:
        out.sum().backward()
        assert soon[-1] == "hopper_backward"
    assert [name for name in begun if name != "hopper_forward"] == expected


def test_a_process_ends_while_kernels_are_printed():
    """Not before the thread that prints is through: it may be inside torch."""
    program = """
import time, torch
from flexpress.codegen.run import meanwhile

def begin(jobs):
    time.sleep(0.5)
    print("through", flush=True)

meanwhile.begun_beside(begin, torch.device("cpu"))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "through\n", "")


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_a_graph_is_captured_while_kernels_are_printed_and_compiled(own_directory, monkeypatch, device):
    """It waits for the kernels that serve in the end, and loads them inside the capture."""
    monkeypatch.setitem(workers.SETTING, "waits", False)
    q, k, v = (torch.randn(1, 8, 1024, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    mod = alibi(alibi_slopes(8, device))

    def step():
        return torch.autograd.grad(flex_attention(q, k, v, mod, mask_mod=causal).sum(), (q, k, v))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    assert not nothing_under_way()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = step()
    q.data.normal_()
    graph.replay()
    assert wait_for_kernels(60)
    assert all(relative_error(a, b) < 1e-2 for a, b in zip(gradients, step(), strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="it has kernels for Hopper")
def test_calls_while_kernels_are_replaced(own_directory, monkeypatch):
    """Right all along, and none but the first waits."""
    monkeypatch.setitem(workers.SETTING, "waits", False)
    slopes = alibi_slopes(16, "cuda").requires_grad_()
    q, k, v = (torch.randn(1, 16, 2048, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    mask, mod = create_block_mask(causal, None, None, 2048, 2048), alibi(slopes)
    exact = dense_attention(q.detach(), k.detach(), v.detach(), mod, causal)[0]
    times, kinds = [], set()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        start = time.perf_counter()
        out = flex_attention(q, k, v, score_mod=mod, block_mask=mask)
        gradients = torch.autograd.grad(out.sum(), (q, k, v, slopes))
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        assert relative_error(out, exact) < 1e-2 and all(g.isfinite().all() for g in gradients)
        kinds.add("meanwhile" in explain(q, k, v, mod, mask))
        if nothing_under_way() and len(times) > 20 and kinds == {True, False}:
            break
    assert kinds == {True, False}
    print(f"first {times[0]:.2f} s, then at most {1e3 * max(times[1:]):.1f} ms")
    assert max(times[2:]) < 0.05
