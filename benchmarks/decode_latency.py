"""Latency of one decoded token: the hierarchical model against its own matrix products, Transformers, `hrm_text`.

For each width, batch size and context, in interleaved rounds on the same machine:

- `hrm_lm`, N×T = 4×3 (17 applications, 380·D² weights read per token), with the decode engine: whole step, and the
  step without the head ("body");
- the bare products: its matrices, in the order of the schedule, through the same kernel and nothing else; and with them
  the attention of every application over its cached keys and values: what has to be read in any case;
- Transformers of 24 layers (equal FLOPs per token), 12 and 4 layers, with the same engine;
- the body of transformers' `hrm_text` of the same widths and cycles, where that library is installed;
- at the longest context and batch size 1: the whole text recomputed for one token, by each of these models.

With --checkpoint: greedy text of a trained model, plain against self-drafting (r and γ as measured), and that of a
Transformer of 4 layers of its size; the tokens must be identical.

    PYTHONPATH=src python benchmarks/decode_latency.py
    PYTHONPATH=src python benchmarks/decode_latency.py --compile --widths 256 --batches 1
    PYTHONPATH=src python benchmarks/decode_latency.py --checkpoint runs/draft --data runs/data/tinystories --widths

Prints cards for people; the last line is JSON for programs.
"""

import gc
import json
import platform
import resource
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import hrmlm
from common import parser_of, told_in_one_line
from hrmlm.errors import UserError
from hrmlm.evaluation.timing import Timing, interleaved
from hrmlm.inference import Completion, GenerationOptions, Generator
from hrmlm.inference.decoding import Runner
from hrmlm.inference.generator import CompiledRunner, compiled
from hrmlm.inference.packing import packed, packed_bytes
from hrmlm.models import LanguageModel
from hrmlm.models.blocks import Linear
from hrmlm.models.cache import KVCache

HRM = {"family": "hrm_lm", "n_cycles": 4, "fast_steps": 3}
LAYERS = (24, 12, 4)
REPEATS = 5


def transformer(n_layers: int) -> dict[str, Any]:
    """Settings of a Transformer."""
    return {"family": "transformer", "n_layers": n_layers}


@dataclass(frozen=True)
class Options:
    """Settings of a run."""

    widths: list[int]
    batches: list[int]
    contexts: list[int]
    vocab_size: int
    threads: int
    rounds: int
    warmup: int
    compile: bool
    checkpoint: str | None
    data: str | None
    tokens: int
    prompts: int
    seed: int


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark. Mistakes end it with one line and exit code 2."""
    with told_in_one_line():
        run(parse(arguments), Console())


def parse(arguments: list[str] | None) -> Options:
    """Options from the command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--widths", type=int, nargs="*", default=[256, 512], help="none: only the checkpoint")
    add("--batches", type=int, nargs="+", default=[1, 8])
    add("--contexts", type=int, nargs="+", default=[128, 1024], help="tokens of context, the new one included")
    add("--vocab-size", type=int, default=50257)
    add("--threads", type=int, default=2)
    add("--rounds", type=int, default=25, help="rounds, the warm-up included")
    add("--warmup", type=int, default=5, help="first rounds, not counted")
    add("--compile", action="store_true", help="compile the steps of the models of this project")
    add("--checkpoint", help="trained model for self-drafting")
    add("--data", help="prepared data whose validation split gives the prompts")
    add("--tokens", type=int, default=128, help="new tokens per prompt")
    add("--prompts", type=int, default=8)
    add("--seed", type=int, default=0)
    return Options(**vars(parser.parse_args(arguments)))


@torch.no_grad()
def run(options: Options, console: Console) -> None:
    """Time everything, print cards and the line of JSON."""
    if options.checkpoint and not options.data:
        raise UserError("--checkpoint needs --data, whose validation split gives the prompts")
    torch.set_num_threads(options.threads)
    result: dict[str, Any] = {"options": asdict(options), "cases": []}
    for width in options.widths:
        for batch in options.batches:
            for context in options.contexts:
                case = Case(options, width, batch, context)
                result["cases"].append(show_case(console, case, case.run()))
                case.calls.clear()  # these hold the models
                gc.collect()
    if options.checkpoint:
        result["drafting"] = drafting(options, console)
    result["peak_memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    result["machine"] = {
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "hrmlm": hrmlm.__version__,
    }
    console.print(
        f"float32, {options.threads} threads, torch {torch.__version__}; medians of {options.rounds - options.warmup} "
        f"interleaved rounds after {options.warmup} to warm up; spread = (slowest - fastest) / median; vocabulary "
        f"{options.vocab_size:,}, random weights{', compiled' if options.compile else ''}; peak memory of the process "
        f"{result['peak_memory_mib']:,} MiB."
    )
    print(json.dumps(result))


class Case:
    """One width, batch size and context: everything that is timed there."""

    def __init__(self, options: Options, width: int, batch: int, context: int) -> None:
        self.options, self.width, self.batch, self.context = options, width, batch, context
        self.open = ExitStack()
        self.calls: dict[str, Callable[[], object]] = {}
        self.bytes: dict[str, dict[str, int]] = {}

    def run(self) -> dict[str, Timing]:
        """Build, time, forget."""
        o = self.options
        torch.manual_seed(o.seed)
        self.tokens_BL = torch.randint(o.vocab_size, (self.batch, self.context))
        with self.open:
            hrm = self.model(HRM)
            self.calls["hrm_lm body"] = self.step(hrm, head=False)
            self.calls["bare products"] = bare_products(hrm, self.batch)
            self.calls["products, attention"] = bare_products(hrm, self.batch, hrm.new_cache(self.batch, self.context))
            models = {"hrm_lm": hrm, **{f"transformer {n}": self.model(transformer(n)) for n in LAYERS}}
            for name, model in models.items():
                self.calls[name] = self.step(model, head=True)
                self.bytes[name] = self.memory(model)
            if (other := self.hrm_text()) is not None:
                self.calls["hrm_text body"] = other
            if self.batch == 1 and self.context == max(o.contexts):
                for name, model in models.items():
                    self.calls[f"{name}, recomputed"] = self.recomputed(model)
            # Several steps per measurement: decoding finds the caches of the processor as its last token left them.
            repeats = {name: 1 if "recomputed" in name else REPEATS for name in self.calls}
            calls = {name: repeated(call, repeats[name]) for name, call in self.calls.items()}
            timings = interleaved(calls, iterations=o.rounds, warmup=o.warmup)
            return {name: Timing(tuple(s / repeats[name] for s in t.seconds)) for name, t in timings.items()}

    def model(self, settings: dict[str, Any]) -> LanguageModel:
        """A packed model with random weights."""
        sizes = {"vocab_size": self.options.vocab_size, "d_model": self.width, "context": self.context}
        model = hrmlm.build({**settings, **sizes}).eval()
        self.open.enter_context(packed(model))
        return model

    def memory(self, model: LanguageModel) -> dict[str, int]:
        """Parameters, and bytes of weights, of their packed copies, and of the cache of this case."""
        cache = model.new_cache(self.batch, self.context)
        parameters = list(model.parameters())
        return {
            "parameters": sum(p.numel() for p in parameters),
            "weight_bytes": sum(p.nbytes for p in parameters),
            "packed_bytes": packed_bytes(model),
            "cache_bytes": cache.bytes,
        }

    def recomputed(self, model: LanguageModel) -> Callable[[], object]:
        """One token without a cache; the head reads the last position only."""
        last_B = torch.tensor([self.context - 1])
        return lambda: model(self.tokens_BL, read_B=last_B)

    def step(self, model: LanguageModel, head: bool) -> Callable[[], object]:
        """Decode the last token, again and again after the same cached context."""
        runner = CompiledRunner(model) if self.options.compile else Runner(model)
        body = bodies(runner, self.options.compile)
        cache = model.new_cache(self.batch, self.context)
        model(self.tokens_BL[:, :-1], cache=cache, read_B=torch.zeros(self.batch, dtype=torch.long))
        last_B1 = self.tokens_BL[:, -1:]
        total = model.total_cycles()

        def decode() -> None:
            call = model.prepare(last_B1, cache=cache)
            runner.first(last_B1, call, total) if head else body(last_B1, call, total)

        return decode

    def hrm_text(self) -> Callable[[], object] | None:
        """The body of transformers' model of the same widths and cycles, one layer per stack, with its own cache."""
        try:
            from transformers import DynamicCache, HrmTextConfig, HrmTextForCausalLM
        except ImportError:
            return None
        config = HrmTextConfig(
            vocab_size=self.options.vocab_size,
            hidden_size=self.width,
            intermediate_size=4 * self.width,
            num_hidden_layers=1,
            num_attention_heads=self.width // 64,
            head_dim=64,
            max_position_embeddings=self.context,
            H_cycles=HRM["n_cycles"],
            L_cycles=HRM["fast_steps"],
            prefix_lm=False,
            tie_word_embeddings=True,
        )
        body = HrmTextForCausalLM(config).eval().model
        cache = DynamicCache(config=config)
        body(input_ids=self.tokens_BL[:, :-1], cache=cache, use_cache=True)

        def decode() -> None:
            body(input_ids=self.tokens_BL[:, -1:], cache=cache, use_cache=True)
            cache.crop(-1)

        return decode


def bodies(runner: Runner, is_compiled: bool) -> Callable[..., object]:
    """The step without the head."""
    model = runner.model

    def body(tokens_BL: Tensor, call: Any, total: int) -> Tensor:
        states = model.begin(tokens_BL, call)
        for index in range(total):
            states = model.cycle(index, states, call)
        return model.read(states)

    return compiled(body) if is_compiled else body


def repeated(call: Callable[[], object], times: int) -> Callable[[], object]:
    """The same call so many times."""

    def calls() -> None:
        for _ in range(times):
            call()

    return calls


def bare_products(model: LanguageModel, batch: int, cache: KVCache | None = None) -> Callable[[], object]:
    """Every matrix of the schedule, application by application, with the kernel that decoding uses; with a cache also
    attention over all that is stored there."""
    layers = {
        name: [layer for layer in model.get_submodule(name).modules() if isinstance(layer, Linear)]
        for name in {application.module for application in model.schedule()}
    }
    inputs = {layer.in_features: torch.randn(batch, 1, layer.in_features) for many in layers.values() for layer in many}
    heads, head_dim = model.config.heads, model.config.d_model // model.config.heads
    q_BH1K = torch.randn(batch, heads, 1, head_dim)

    def products() -> None:
        for application in model.schedule():
            for layer in layers[application.module]:
                layer(inputs[layer.in_features])
            if cache is not None:
                F.scaled_dot_product_attention(q_BH1K, cache.keys[application.slot], cache.values[application.slot])

    return products


def show_case(console: Console, case: Case, timings: dict[str, Timing]) -> dict[str, Any]:
    """Print one card; return its numbers."""
    applications = {"hrm_text body": 16, **{f"transformer {n}": n for n in LAYERS}}
    title = f"D={case.width}, batch {case.batch}, context {case.context}"
    table = Table(title=title, title_justify="left")
    for column in ("", "ms/step", "spread", "µs/app.", "weights", "cache"):
        table.add_column(column, justify="right" if column else "left")
    for name, timing in timings.items():
        count = applications.get(name, 17)
        per = "" if "recomputed" in name else f"{1e6 * timing.median / count:,.0f}"
        sizes = case.bytes.get(name)
        memory = [f"{sizes[key] / 2**20:,.1f} MiB" if sizes else "" for key in ("weight_bytes", "cache_bytes")]
        table.add_row(name, f"{1000 * timing.median:,.2f}", f"{timing.spread:.0%}", per, *memory)
    console.print(table)
    body = timings["hrm_lm body"]
    ratios = {
        "body / bare products": (body.ratio(timings["bare products"]), "at most 1.5"),
        "body / products and attention": (body.ratio(timings["products, attention"]), "what reading allows: 1"),
        "hrm_lm / transformer 24": (timings["hrm_lm"].ratio(timings["transformer 24"]), "at most 1, at D=256 0.83"),
        "hrm_lm / transformer 4": (timings["hrm_lm"].ratio(timings["transformer 4"]), "at most 3.5"),
    }
    if "hrm_text body" in timings:
        ratio = timings["hrm_text body"].ratio(body) * 17 / 16
        ratios["hrm_text / body, per application"] = (ratio, "at least 4")
    if (whole := timings.get("hrm_lm, recomputed")) is not None:
        ratios["recomputed / cached"] = (whole.ratio(timings["hrm_lm"]), "at least 20")
    for name, (ratio, aim) in ratios.items():
        console.print(f"{name}: {ratio:.2f} (aim: {aim})")
    rows = {name: {"milliseconds": 1000 * t.median, "spread": t.spread} for name, t in timings.items()}
    ratio_values = {name: ratio for name, (ratio, _) in ratios.items()}
    sizes = {"width": case.width, "batch": case.batch, "context": case.context}
    return {**sizes, "rows": rows, "ratios": ratio_values, "memory": case.bytes}


def drafting(options: Options, console: Console) -> dict[str, Any]:
    """Greedy text of a trained model: plain, drafted, and a Transformer of 4 layers of the same size."""
    from hrmlm.data.tokens import PreparedData

    assert options.checkpoint is not None
    assert options.data is not None
    model, tokenizer = hrmlm.load(options.checkpoint), hrmlm.load_tokenizer(options.checkpoint)
    ids = PreparedData.open(Path(options.data)).split("valid")
    length = min(64, model.config.context - options.tokens)
    starts = range(0, len(ids) - length, max(1, (len(ids) - length) // options.prompts))
    prompts = [[int(token) for token in ids[start : start + length]] for start in list(starts)[: options.prompts]]
    torch.manual_seed(options.seed)
    shallow = hrmlm.build(
        {
            **transformer(4),
            "vocab_size": model.config.vocab_size,
            "used_vocab": model.config.used_vocab,
            "d_model": model.config.d_model,
            "context": model.config.context,
        }
    ).eval()
    untrained = hrmlm.build(model.config.model_dump()).eval()
    plain = GenerationOptions(temperature=0, max_new_tokens=options.tokens)
    drafted = plain.model_copy(update={"draft": "auto"})
    seconds: dict[str, list[float]] = {"plain": [], "drafted": [], "transformer 4": [], "no agreement": []}
    shares, same = [], True
    with ExitStack() as stack:
        trained, small, random = (
            stack.enter_context(Generator(m, tokenizer, compile=options.compile)) for m in (model, shallow, untrained)
        )
        generators = {"trained": trained, "small": small, "random": random}
        for index, prompt in enumerate([prompts[0], *prompts]):  # the first one warms up
            timings, rows = texts(generators, prompt, plain, drafted)
            if index == 0:
                continue
            tokens = len(rows[0].ids)
            same = same and rows[0].ids == rows[1].ids
            shares.append(sum(rows[1].drafted) / tokens)
            for name in ("plain", "drafted", "transformer 4"):
                seconds[name].append(timings[name].median / tokens)
            seconds["no agreement"].append(timings["untrained drafted"].ratio(timings["untrained plain"]))
    rows_of = {name: Timing(tuple(values)) for name, values in seconds.items()}
    result = {
        "identical": same,
        "drafted_share": statistics.mean(shares),
        "speed_up": rows_of["plain"].ratio(rows_of["drafted"]),
        "plain / transformer 4": rows_of["plain"].ratio(rows_of["transformer 4"]),
        "drafted / transformer 4": rows_of["drafted"].ratio(rows_of["transformer 4"]),
        "untrained drafted / plain": rows_of["no agreement"].median,
        "milliseconds": {name: 1000 * t.median for name, t in rows_of.items() if name != "no agreement"},
    }
    table = Table(title=f"Greedy text of {options.checkpoint}", title_justify="left")
    for column in ("", "ms/token", "spread"):
        table.add_column(column, justify="right" if column else "left")
    for name, timing in rows_of.items():
        if name != "no agreement":
            table.add_row(name, f"{1000 * timing.median:.2f}", f"{timing.spread:.0%}")
    console.print(table)
    console.print(
        f"tokens identical: {same}; {result['drafted_share']:.0%} of them drafted; speed-up {result['speed_up']:.2f} "
        f"(aim: at least 1.5); plain {result['plain / transformer 4']:.2f} and drafted "
        f"{result['drafted / transformer 4']:.2f} times a Transformer of 4 layers (aims: at most 3.5 and 2.3); with "
        f"untrained weights drafting costs {result['untrained drafted / plain']:.3f} of plain decoding (aim: at most "
        f"1.05); {len(prompts)} prompts of {length} tokens, {options.tokens} new ones each."
    )
    return result


def texts(
    generators: dict[str, Generator], prompt: list[int], plain: GenerationOptions, drafted: GenerationOptions
) -> tuple[dict[str, Timing], list[Completion]]:
    """Times of one text of each kind; the trained model's text, plain and drafted."""
    rows: list[Completion] = []

    def keep(options: GenerationOptions) -> None:
        rows.append(generators["trained"].generate([prompt], options)[0])

    timings = interleaved(
        {
            "plain": lambda: keep(plain),
            "drafted": lambda: keep(drafted),
            "transformer 4": lambda: generators["small"].generate([prompt], plain),
            "untrained plain": lambda: generators["random"].generate([prompt], plain),
            "untrained drafted": lambda: generators["random"].generate([prompt], drafted),
        },
        iterations=1,
        warmup=0,
    )
    return timings, rows


if __name__ == "__main__":
    main()
