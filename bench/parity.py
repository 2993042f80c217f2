"""Tiny models with adapters in vLLM on this machine's GPU against Hugging Face and PEFT in fp32.

usage: python -m bench.parity --cases DIR --out FILE     (bench.parity_cases made DIR)

Every case is served by several engines at once: this package's kernels with CUDA graphs, without, and with ngram
speculative decoding, and vLLM's own; those on two GPUs run if they are named. Each asks for its prompts one by one and
in one batch. One line per case, engine and adapter: the worst difference of a log-probability, tokens compared, PASS or
FAIL. Exit status 1 after a FAIL.
The kernels' plugin must be installed (vLLM finds it by its entry point); nothing else of lorahost is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.parity_compare import compare, line, row

LISTED = 10  # log-probabilities that the engine gives
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
GRAPHS = [1, 2, 4, 8, 16, 32, 64, 128]  # of vLLM's own; ours choose theirs, up to the largest batch
PADDED = {"inductor_compile_config": {"force_shape_pad": True}}


@dataclass(frozen=True)
class Engine:
    """One way to run a case: LORAHOST_KERNELS, engine arguments on top of the case's, and where it is possible.

    without: cases that vLLM can't serve so; skip: LORAHOST_SKIP_UNTOUCHED.
    """

    kernels: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    mxfp4_only: bool = False
    without: tuple[str, ...] = ()
    cpu: bool = False
    gpus: int = 1
    launch_all: bool = False

    @property
    def operations(self) -> str:
        """What the plugin must say that each of its operations runs on."""
        return "torch" if self.cpu else "triton" if self.kernels == "on" else "stock"

    @property
    def expected(self) -> set[str]:
        """All that the plugin's operations may run on here."""
        on_gpu = ["busy-first", "launched" if self.launch_all else "skipped"] if self.operations == "triton" else []
        return {self.operations, "background", *on_gpu}


# vLLM's rotary operation for CPUs misreads the strided queries and keys of DeepSeek without MLA
CPU = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 26,
    "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
}
ENGINES = {
    "ours-graphs": Engine("on"),
    # torch.compile without CUDA graphs
    "ours-compiled": Engine("on", {"compilation_config": {"cudagraph_mode": "NONE"}}),
    # neither; fewer slots than adapters: they take turns
    "ours-eager": Engine("on", {"enforce_eager": True, "max_loras": 2}),
    # graphs whose launches come and go with the adapters in the slots, and such that have them all
    "ours-skip": Engine("on", {"max_loras": 1}),
    "ours-slots": Engine("on", {"max_loras": 1}, launch_all=True),
    "ours-ngram": Engine("on", {"speculative_config": DRAFTS}),
    # vLLM's attention sinks and its MXFP4 experts are for bf16 only
    "ours-fp16": Engine("on", {"dtype": "float16"}, without=("gpt-oss", "gpt-oss-mxfp4")),
    # products whose columns are no multiple of 8 are padded for certain, see lorahost_kernels.vllm_026.router_logits
    "ours-padded": Engine("on", {"compilation_config": PADDED}),
    "ours-marlin": Engine("on", {"moe_backend": "marlin"}, mxfp4_only=True),
    "ours-tp2": Engine("on", {"tensor_parallel_size": 2}, gpus=2),
    # Marlin pads the columns of a rank, see lorahost_kernels.vllm_026.tp_slices
    "ours-marlin-tp2": Engine("on", {"tensor_parallel_size": 2, "moe_backend": "marlin"}, mxfp4_only=True, gpus=2),
    "stock-marlin-tp2": Engine("off", {"tensor_parallel_size": 2, "moe_backend": "marlin"}, mxfp4_only=True, gpus=2),
    "stock-graphs": Engine("off"),
    # without torch.compile every step between products is rounded to bf16: what of a difference is vLLM's own
    "stock-eager": Engine("off", {"enforce_eager": True}),
    "stock-ngram": Engine("off", {"speculative_config": DRAFTS}),
    "cpu": Engine("off", CPU, cpu=True),
    # without bf16's rounding: whether the reference is what the CPU path computes
    "cpu-fp32": Engine("off", {**CPU, "dtype": "float32"}, cpu=True),
    "cpu-ngram": Engine("off", {**CPU, "speculative_config": DRAFTS}, cpu=True),
}


def arguments(case: Path, engine: Engine) -> dict[str, Any]:
    """Arguments of vLLM's LLM."""
    described: dict[str, Any] = json.loads((case / "case.json").read_text())["engine"]
    common: dict[str, Any] = {
        "model": str(case / "model"), "dtype": "bfloat16", "skip_tokenizer_init": True, "seed": 0,
        "max_model_len": 256, "max_num_seqs": 32, "max_num_batched_tokens": 512, "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.03, "kv_cache_memory_bytes": 1 << 28, "disable_log_stats": False,
        "enable_lora": True, "max_lora_rank": 16, "max_cpu_loras": 8,
        "worker_extension_cls": "lorahost_kernels.vllm_026.worker.WorkerExtension",
        # part of the compile cache's key: what was traced with other kernels is not loaded
        "additional_config": {"kernels": engine.kernels},
    }  # fmt: skip
    if engine.kernels == "off" and not engine.arguments.get("enforce_eager"):
        common["compilation_config"] = {"cudagraph_capture_sizes": GRAPHS}
    return common | described | dict(engine.arguments)


def serve(case: Path, engine: Engine) -> dict[str, Any]:
    """Starts one engine in this process and asks for all jobs of the case, alone and mixed.

    Returns:
        answers: mode -> one list per job of (token, {token: log-probability}) per step; operations; drafts.

    Raises:
        RuntimeError: the plugin is not active, or runs other code than this engine is there to check.
    """
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    jobs = json.loads((case / "expected.json").read_text())
    llm = LLM(**arguments(case, engine))
    report = llm.collective_rpc("lorahost_report")[0]
    if not report["active"] or set(report["operations"].values()) != engine.expected:
        raise RuntimeError(f"expected the plugin to be active with {engine.operations} operations, found {report}")
    adapters = sorted({job["adapter"] for job in jobs if job["adapter"]})
    requests = {a: LoRARequest(a, i, str(case / "adapters" / a)) for i, a in enumerate(adapters, start=1)}
    captured = report["graph_nodes"]["builds"]
    params = SamplingParams(temperature=0, max_tokens=len(jobs[0]["steps"]), logprobs=LISTED, ignore_eos=True)

    def ask(batch: Sequence[Mapping[str, Any]]) -> list[Any]:
        outputs = llm.generate(
            [{"prompt_token_ids": job["prompt"]} for job in batch],
            params,
            lora_request=[requests.get(job["adapter"]) for job in batch],
            use_tqdm=False,
        )
        return [
            [
                (token, {int(i): entry.logprob for i, entry in listed.items()})
                for token, listed in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
            ]
            for output in outputs
        ]

    answers = {"alone": [ask([job])[0] for job in jobs], "mixed": ask(jobs), "reversed": ask(jobs[::-1])[::-1]}
    graphs = llm.collective_rpc("lorahost_report")[0]["graph_nodes"]
    print("graphs:", graphs)
    if engine == ENGINES["ours-skip"] and graphs["builds"] <= captured:
        raise RuntimeError(f"expected graphs that are built anew as adapters come and go, found {graphs}")
    drafts = [m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_draft_tokens"]
    return {"answers": answers, "operations": report["operations"], "drafts": sum(drafts) if drafts else None}


class Run:
    """The engines' processes."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self._args, self._work = args, work
        self._waiting = plan(args)
        self._running: dict[tuple[str, str], subprocess.Popen[bytes]] = {}
        self._started: dict[tuple[str, str], float] = {}
        self._deadline = time.monotonic() + args.limit

    def rows(self) -> list[dict[str, Any]]:
        """Runs all engines, prints a line for each result as it comes."""
        rows: list[dict[str, Any]] = []
        while self._waiting or self._running:
            while self._waiting and len(self._running) < self._args.parallel:
                self._start(*self._waiting.pop(0))
            ended = [key for key, process in self._running.items() if process.poll() is not None]
            if time.monotonic() > self._deadline:
                ended, self._waiting = [*self._running, *self._waiting], []
            for key in ended:
                new = self._collect(key)
                rows += new
                print(*map(line, new), sep="\n", flush=True)
            time.sleep(0.2)
        return rows

    def _start(self, case: str, engine: str) -> None:
        environment = {
            "LORAHOST_KERNELS": ENGINES[engine].kernels,
            "LORAHOST_SKIP_UNTOUCHED": "off" if ENGINES[engine].launch_all else "on",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_DISABLE_COMPILE_CACHE": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
            # NVLink multicast stays off
            "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        }  # fmt: skip
        if ENGINES[engine].cpu:
            # MLA has no CPU backend
            environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_MLA_DISABLE": "1"}
        command = [*(sys.executable, "-m", "bench.parity", "--cases", str(self._args.cases)),
                   *("--out", str(self._result(case, engine)), "--serve", case, engine)]  # fmt: skip
        log = self._log(case, engine).open("wb")
        process = subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT)
        self._running[case, engine], self._started[case, engine] = process, time.monotonic()

    def _collect(self, key: tuple[str, str]) -> list[dict[str, Any]]:
        case, engine = key
        process = self._running.pop(key, None)
        if process is None:
            return [row(case, engine, "-", [f"not started within {self._args.limit} s"])]
        if process.poll() is None:
            process.kill()
        status = process.wait()
        print(f"     {case} {engine}: {time.monotonic() - self._started[key]:.0f} s", flush=True)
        if status or not self._result(case, engine).exists():
            text = self._log(case, engine).read_text(errors="replace")
            tail = [part for part in text.splitlines() if part.strip()][-12:]
            return [row(case, engine, "-", [f"the engine ended with status {status}: " + "\n       ".join(tail)])]
        jobs = json.loads((self._args.cases / case / "expected.json").read_text())
        served = json.loads(self._result(case, engine).read_text(), object_pairs_hook=_numbered)
        return compare(case, engine, jobs, served)

    def _log(self, case: str, engine: str) -> Path:
        return self._work / f"{case}.{engine}.log"

    def _result(self, case: str, engine: str) -> Path:
        return self._work / f"{case}.{engine}.json"


def _numbered(pairs: list[tuple[str, Any]]) -> dict[Any, Any]:
    """JSON has no whole numbers as keys; the log-probabilities of a step are by token."""
    return {int(key) if key.isdecimal() else key: value for key, value in pairs}


def plan(args: argparse.Namespace) -> list[tuple[str, str]]:
    """(case, engine) of all processes, all cases of an engine before the next engine."""
    cases = args.only or sorted(path.parent.name for path in args.cases.glob("*/expected.json"))
    mxfp4 = {case: json.loads((args.cases / case / "case.json").read_text())["mxfp4"] for case in cases}
    names = args.engines or [name for name, engine in ENGINES.items() if not engine.cpu and engine.gpus == 1]

    def possible(case: str, engine: Engine) -> bool:
        if case in engine.without:
            return False
        return not engine.cpu if mxfp4[case] else not engine.mxfp4_only

    return [(case, name) for name in names for case in cases if possible(case, ENGINES[name])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSON, one row per line")
    parser.add_argument("--only", nargs="*", metavar="CASE")
    parser.add_argument("--engines", nargs="*", choices=ENGINES, metavar="ENGINE", help=", ".join(ENGINES))
    parser.add_argument("--parallel", type=int, default=16, help="engines at a time")
    parser.add_argument("--limit", type=float, default=190, help="seconds after which engines are stopped")
    parser.add_argument("--logs", type=Path, help="folder for the engines' logs")
    parser.add_argument("--serve", nargs=2, metavar=("CASE", "ENGINE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        case, engine = args.serve
        args.out.write_text(json.dumps(serve(args.cases / case, ENGINES[engine])))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        work = args.logs or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        rows = Run(args, work).rows()
    args.out.write_text("".join(json.dumps(result) + "\n" for result in rows))
    failed = sum(not result["passed"] for result in rows)
    print(f"{len(rows)} rows, {failed} failed")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
