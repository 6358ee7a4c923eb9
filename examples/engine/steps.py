"""The tensors of a step: what a plan is for the kernels, the run of the model over it, and CUDA graphs of such runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flexpress import (
    PageAllocator,
    Precompiled,
    SharedPrefix,
    and_masks,
    apply_rope,
    cached_attention,
    precompile_cached,
    rope_table,
    update_cache,
)
from flexpress.mods import MaskMod, causal, tree

from .dense import dense_attention
from .llama import Attend, Llama
from .scheduler import Work

GROUPS = 8  # of sequences that share a prefix, in a captured step
GRAPHS = 128  # at most: each takes memory. Steps of further shapes run without


@dataclass(frozen=True)
class Shape:
    """What a step's tensors are as large as. A CUDA graph serves all steps of one shape.

    sequences, tokens, rows   of the batch; what is behind the real ones computes nothing that anybody reads
    max_q_len                 the most tokens of a sequence, or more
    nodes                     of a tree, or more; 0 if nothing was drafted
    shared                    are shared pages read once?
    """

    sequences: int
    tokens: int
    rows: int
    max_q_len: int
    nodes: int
    shared: bool = False

    @staticmethod
    def of(step: list[Work]) -> Shape:
        """As large as needed."""
        lengths = [len(work.tokens) for work in step]
        nodes = max(len(work.parents) for work in step)
        return Shape(len(step), sum(lengths), max(1, sum(work.rows for work in step)), max(lengths), nodes)

    def rounded(self) -> Shape:
        """A little larger, so that there are few shapes. A sequence that is not there costs next to nothing beside a chunk."""
        chunks = self.max_q_len > max(1, self.nodes)
        sequences, nodes = (_of_chunks if chunks else _power)(self.sequences), _rounded(self.nodes)
        decoding = sequences * max(1, nodes)  # tokens, where nobody computes a prompt
        tokens = _rounded(self.tokens) if chunks else min(_rounded(self.tokens), decoding)
        rows = min(tokens, _rounded(self.rows)) if nodes else sequences
        return Shape(sequences, max(tokens, rows), rows, tokens if chunks else max(1, nodes), nodes, self.shared)


def _power(n: int) -> int:
    """The next power of two."""
    return 1 << max(0, n - 1).bit_length()


def _of_chunks(n: int) -> int:
    """1, or the next of 2, 8, 32 and so on. One or two sequences with a whole chunk take the kernel of long prompts."""
    return 1 if n == 1 else 2 << -(-max(0, (n - 1).bit_length() - 1) // 2) * 2


def _rounded(n: int) -> int:
    """The next power of two, or 1.5 times one."""
    power = _power(n)
    return 0 if n == 0 else 3 * power // 4 if power >= 8 and n <= 3 * power // 4 else power


class Inputs:
    """int32 tensors that tell the kernels what a step is, in one piece of memory, which is sent in one copy.

    ids, positions   (tokens,): of the text, and where RoPE turns them to
    cu_seqlens_q     (sequences + 1,): where each sequence's tokens begin
    kv_len           (sequences,): its tokens in the cache after this step
    start            (sequences,): of these, the ones before its tree
    page_table       (sequences, width)
    parents          (sequences, nodes): of its tree
    rows             (rows,): the tokens after which a next one is wanted
    """

    def __init__(self, shape: Shape, width: int, device: torch.device) -> None:
        self.shape, tokens, sequences = shape, shape.tokens, shape.sequences
        shapes = {
            "ids": (tokens,),
            "positions": (tokens,),
            "cu_seqlens_q": (sequences + 1,),
            "kv_len": (sequences,),
            "start": (sequences,),
            "page_table": (sequences, width),
            "parents": (sequences, shape.nodes),
            "rows": (shape.rows,),
        }
        sizes = {name: -(-torch.Size(shape).numel() // 32) * 32 for name, shape in shapes.items()}  # aligned
        self.sent = torch.zeros(sum(sizes.values()), dtype=torch.int32, device=device)
        self.host = torch.zeros(self.sent.shape, dtype=torch.int32, pin_memory=device.type == "cuda")

        def views(memory: Tensor) -> dict[str, Tensor]:
            pieces = zip(shapes.items(), memory.split(list(sizes.values())), strict=True)
            return {name: piece[: torch.Size(shape).numel()].view(shape) for (name, shape), piece in pieces}

        self.on_device = views(self.sent)
        self.filled = {name: view.numpy() for name, view in views(self.host).items()}
        self.filled["page_table"].fill(-1)
        self.filled["parents"].fill(-1)
        self.width, self._pages = width, [(-1, 0)] * sequences  # of each row of the table: whose pages it has, and how many

    def fill(self, step: list[Work], pool: PageAllocator) -> None:
        """Writes a step, and sends it."""
        written: dict[str, list[int]] = {"ids": [], "positions": [], "cu_seqlens_q": [0], "kv_len": [], "start": [], "rows": []}
        for b, work in enumerate(step):
            first, count = work.request.cached, len(work.tokens)
            written["ids"] += work.tokens
            written["positions"] += _depths(work.parents, first) if work.parents else range(first, first + count)
            token = len(written["ids"])
            written["cu_seqlens_q"].append(token)
            written["kv_len"].append(first + count)
            written["start"].append(first if work.parents else first + count)
            written["rows"] += range(token - work.rows, token)
            if self.shape.nodes:
                self.filled["parents"][b] = work.parents + [-1] * (self.shape.nodes - len(work.parents))
            sequence = work.request.sequence
            has = sequence, -(-pool.length(sequence) // pool.page_size)
            if self._pages[b] != has:  # no page is ever copied, so pages are only added
                pages = pool.pages(sequence)
                self.filled["page_table"][b] = pages + [-1] * (self.width - len(pages))
                self._pages[b] = has
        written["cu_seqlens_q"] += [token] * (self.shape.sequences - len(step))
        for name, numbers in written.items():  # a sequence that is not there has no tokens
            self.filled[name][: len(numbers)] = numbers
            self.filled[name][len(numbers) :] = 0
        self.sent.copy_(self.host, non_blocking=True)


def _mask(inputs: Inputs) -> MaskMod | None:
    """What a token sees. A sequence without a tree has its start behind all its tokens."""
    to = inputs.on_device
    return and_masks(causal, tree(to["parents"], to["start"])) if inputs.shape.nodes else None


def _depths(parents: list[int], first: int) -> list[int]:
    """The position of each node of a tree, whose root is at `first`."""
    found: list[int] = []
    for parent in parents:
        found.append(first if parent < 0 else found[parent] + 1)
    return found


@dataclass
class Captured:
    """A CUDA graph, what it reads, and the tokens that it leaves."""

    graph: torch.cuda.CUDAGraph
    inputs: Inputs
    shared: SharedPrefix | None
    chosen: Tensor
    shows: SharedPrefix | None = None  # what was copied to `shared` last


class Steps:
    """The model, the cache of all its layers, and what runs one over the other."""

    def __init__(self, model: Llama, pool: PageAllocator, max_length: int, *, float8: bool, graphs: bool) -> None:
        """max_length: tokens of a sequence. float8: the cache holds e4m3; see `calibrate`. graphs: capture steps as CUDA graphs."""
        config, self.device = model.config, model.head.device
        self.model, self.pool, self.graphs = model, pool, graphs
        layers, kv_heads = config.num_hidden_layers, config.num_key_value_heads
        dtype = torch.float8_e4m3fn if float8 else model.head.dtype
        shape = (layers, 2, pool.num_pages, pool.page_size, kv_heads, config.head_dim)
        self.cache = torch.empty(shape, dtype=dtype, device=self.device)
        self.scales = torch.ones(layers, 2, kv_heads, device=self.device) if float8 else None
        self.width = -(-max_length // pool.page_size)
        self.rope = rope_table(max_length, config.head_dim, config.rope_theta, scaling=config.scaling, device=self.device)
        self.nobody = pool.allocate()  # a sequence without tokens, for places in a batch where there is none
        self._captured: dict[Shape, Captured] = {}
        self._memory = torch.cuda.graph_pool_handle() if graphs else None
        self._grouped: tuple[list[int], SharedPrefix | None] = [], None
        self.say: Callable[[str], object] = lambda line: None  # what takes time besides steps

    def compile(self, max_sequences: int, chunk: int, nodes: int) -> int:
        """Have the kernels of attention compiled side by side that steps of an engine with these limits need: decoding, with trees of
        drafts (nodes; 0: none), and chunks of prompts, of any number of sequences. Returns how many that were."""
        shapes = {
            Shape(n, tokens, n * max(1, drafted), most, drafted).rounded()
            for n in {min(1 << i, max_sequences) for i in range(max_sequences.bit_length() + 1)}
            for drafted in {0, nodes}  # nobody may have a draft
            for tokens, most in ((n * max(1, drafted), max(1, drafted)), (chunk + n, chunk + n))
        }
        begun, seen = time.perf_counter(), len(shapes)
        index = self.device.index if self.device.type == "cuda" else -1

        def compiled(shape: Shape) -> list[Precompiled]:
            with torch.cuda.device(index):  # which belongs to a thread
                return self._compile(shape)

        with ThreadPoolExecutor(8) as threads:
            found = set().union(*threads.map(compiled, sorted(shapes, key=lambda shape: (shape.sequences, shape.tokens))))
        self.say(f"{len(found)} kernels compiled for {seen} kinds of steps in {time.perf_counter() - begun:.1f} s")
        return len(found)

    def _compile(self, shape: Shape) -> list[Precompiled]:
        """The kernels of attention in steps of a shape, with shared prefixes and without."""
        inputs, config = Inputs(shape, self.width, self.device), self.model.config
        to, query_shape = inputs.on_device, (shape.tokens, config.num_attention_heads, config.head_dim)
        names = "kv_len", "page_table", "cu_seqlens_q"
        batch = {name: to[name] for name in names} | {"max_q_len": shape.max_q_len, "shared_prefix": (GROUPS, self.width)}
        scales = {} if self.scales is None else dict(zip(("k_scale", "v_scale"), self.scales[0].unbind(), strict=True))
        query = torch.empty(query_shape, dtype=self.model.head.dtype, device="meta")  # the cache may have another dtype
        return precompile_cached(query, *self.cache[0].unbind(), **batch, **scales, mask_mod=_mask(inputs), device=self.device)

    def run(self, step: list[Work]) -> list[list[int]]:
        """The likeliest next tokens of the rows of each work."""
        shape = Shape.of(step).rounded() if self.graphs else Shape.of(step)
        shared = self._shared([work.request.sequence for work in step], shape.sequences)
        if shared is not None and shared.pays(*self.cache[0], queries=shape.tokens):
            shape = replace(shape, shared=True)
        chosen = self._replayed(step, shape, shared) if self.graphs else self._run(step, shape, shared)[0]
        found = iter(chosen.tolist())
        return [[next(found) for _ in range(work.rows)] for work in step]

    def move(self, places: list[tuple[int, int]]) -> None:
        """Copies tokens of the cache, in all layers, from and to page * page_size + row."""
        sources, targets = (torch.tensor(numbers, device=self.device) for numbers in zip(*places, strict=True))
        numbers = self.cache.view(torch.uint8).flatten(2, 3)  # float8 has no operations of its own
        numbers[:, :, targets] = numbers[:, :, sources]

    def calibrate(self, ids: list[int]) -> None:
        """Scales of float8 caches: twice the largest key and value of each head in a text are the largest number that e4m3 has."""
        assert self.scales is not None
        largest = torch.finfo(torch.float8_e4m3fn).max

        def looked_at(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            for i, t in enumerate((k, v)):
                self.scales[layer, i] = t.float().abs().amax((0, 2)).clamp_min(1e-6) * 2 / largest
            return k, v

        every = torch.tensor(ids, device=self.device)
        self.model.logits(every, torch.tensor([0], device=self.device), dense_attention(self.model.config, looked_at))

    def stored(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (tokens, heads, head_dim) as the cache gives them back."""
        if self.scales is None:
            return k, v
        largest = torch.finfo(torch.float8_e4m3fn).max
        k_scale, v_scale = (self.scales[layer, i][:, None] for i in range(2))
        return tuple(
            ((t.float() / s).clamp(-largest, largest).to(torch.float8_e4m3fn).float() * s).to(t) for t, s in ((k, k_scale), (v, v_scale))
        )

    def _shared(self, sequences: list[int], size: int) -> SharedPrefix | None:
        """Which of them share pages, in a batch of that size. It stays the same as long as they do."""
        padded = sequences + [self.nobody] * (size - len(sequences))
        if self._grouped[0] != padded:
            room = {"groups": GROUPS, "width": self.width} if self.graphs else {}
            self._grouped = padded, self.pool.shared_prefix(padded, self.device, **room)
        return self._grouped[1]

    def _run(self, step: list[Work], shape: Shape, shared: SharedPrefix | None) -> tuple[Tensor, Inputs]:
        inputs = Inputs(shape, self.width, self.device)
        inputs.fill(step, self.pool)
        return self._forward(inputs, shared), inputs

    def _replayed(self, step: list[Work], shape: Shape, shared: SharedPrefix | None) -> Tensor:
        """By the graph of such steps. The first one runs without, which compiles kernels, and is captured then."""
        if shape not in self._captured:
            begun = time.perf_counter()
            chosen, inputs = self._run(step, shape, shared)
            ran = time.perf_counter() - begun
            if len(self._captured) >= GRAPHS:
                return chosen
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory):
                left = self._forward(inputs, shared)
            self._captured[shape] = Captured(graph, inputs, shared if shape.shared else None, left)
            self._grouped = [], None  # what the graph reads is its own
            kind = f"{shape.sequences} sequences, {shape.tokens} tokens{', shared' * shape.shared}"
            self.say(f"graph {len(self._captured)}: {kind}; ran in {ran:.2f} s, captured in {time.perf_counter() - begun - ran:.2f}")
            return chosen
        captured = self._captured[shape]
        captured.inputs.fill(step, self.pool)
        if captured.shared is not None and captured.shows is not shared:
            captured.shared.update(shared)
            captured.shows = shared
        captured.graph.replay()
        return captured.chosen

    def _forward(self, inputs: Inputs, shared: SharedPrefix | None) -> Tensor:
        """int32 (rows,): the likeliest tokens."""
        to = inputs.on_device
        logits = self.model.logits(to["ids"], to["rows"], self._attention(inputs, shared))
        return logits.argmax(-1).int()

    def _attention(self, inputs: Inputs, shared: SharedPrefix | None) -> Attend:
        """Attention of a step's tokens to all that is cached of their sequences; they are written there first."""
        to, shape, config = inputs.on_device, inputs.shape, self.model.config
        q_heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        batch = {name: to[name] for name in ("kv_len", "page_table", "cu_seqlens_q")}
        tables = None
        if shape.shared and shared is not None:
            tables = shared.tables(**batch, queries=shape.tokens)
        batch["max_q_len"] = shape.max_q_len
        mask = _mask(inputs)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            caches = self.cache[layer].unbind()
            scales = {} if self.scales is None else dict(zip(("k_scale", "v_scale"), self.scales[layer].unbind(), strict=True))
            if mask is None:
                q, k, v = qkv.split([q_heads, kv_heads, kv_heads], 1)
                q = update_cache(k, v, *caches, query=q, rope=self.rope, **batch, **scales)
            else:  # nodes of a tree lie one after another, and turn by their depth
                turned, v = qkv.split([q_heads + kv_heads, kv_heads], 1)
                q, k = apply_rope(turned, self.rope, to["positions"]).split([q_heads, kv_heads], 1)
                update_cache(k, v, *caches, **batch, **scales)
            return cached_attention(q, *caches, mask_mod=mask, shared_prefix=tables, **batch, **scales)

        return attend
