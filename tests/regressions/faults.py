"""All faults: threads and compile, the step, the exchange, the update, the run with its checkpoints, the proof."""

from __future__ import annotations

from tests.regressions.fault import Check, Fault, Rule

_RO = {"strategy": "reduce-overhead"}
_WHOLE = {"strategy": "whole-step"}
_BF16 = {"dtype": "bfloat16"}
_ONE_GPU = {"drafter_devices": ["cuda:0", "cuda:0"]}
"""Between GPUs another exchange does the work."""

_COMPILE = (
    Fault(
        "syntax-error",
        what="a line that no Python takes",
        lost="the first minute of the job, on the host",
        rule=Rule("syntax", "expected ':'"),
    ),
    Fault(
        "mode-and-options",
        what="compiles with `mode=` and `options=` together, the last of the three fixes that failed",
        lost="the run, at its first compile",
        rule=Rule("compile-mode-and-options", "it takes one of them"),
        cpu=Check("worker", "Either mode or options can be specified", alone=False),
        workload=_RO,
    ),
    Fault(
        "trees-in-threads",
        what="leaves CUDAGraph Trees on in worker threads",
        lost="every worker, at its first step (torch up to 2.12)",
        cuda=Check("worker", "AssertionError", alone=False),
        workload=_RO,
    ),
    Fault(
        "trees-stashed-by-hand",
        what="trees on, and the C-level TLS stash in each worker, the first fix that failed",
        lost="every worker, at its first capture",
        rule=Rule("private-tls-stash", "private thread-local stash"),
        cuda=Check("worker", "", alone=False, dies=True),
        workload=_RO,
    ),
    Fault(
        "trees-filled-by-hand",
        what="trees on, their Python-level state filled in each worker, workers one by one: the second fix that failed",
        lost="every worker, in its first backward, where autograd has threads of its own (ours keep it in the worker)",
        rule=Rule("private-tls-stash", "thread-local state by hand"),
        workload=_RO,
    ),
    Fault(
        "trees-off-in-the-main-thread",
        what="switches the trees off in the main thread's configuration",
        lost="every worker, from torch 2.12 on: it does not see that value",
        rule=Rule("trees-config-outside-worker", "holds for the thread"),
    ),
    Fault(
        "recompile-limit-in-the-main-thread",
        what="raises the recompile limit in the main thread's configuration",
        lost="compiled steps, in silence, in workers that need more than 8",
        rule=Rule("config-outside-worker", "holds for the", warns=True),
    ),
    Fault(
        "compiles-without-gate",
        what="builds and compiles all workers at once",
        lost="workers, at random: 2 of 4 died on one GPU",
        rule=Rule("compile-outside-gate", "outside any gate", alone=False),
        cpu=Check("compile_gate", "began outside the gate", alone=False),
        workload=_RO,
    ),
    Fault(
        "compiles-behind-the-gate",
        what="each worker compiles one more small function when it has left the gate",
        lost="another worker's capture, or this compile",
        rule=Rule("compile-outside-gate", "outside any gate"),
        cpu=Check("compile_gate", "began outside the gate"),
        workload=_RO,
    ),
    Fault(
        "size-asserts-off",
        what="one code object for all workers, and Inductor's size asserts off",
        lost="the run: gradients wrong by 1.5, and nothing says so",
        rule=Rule("size-asserts-off", "only check that a replayed graph still has its own weights"),
        cpu=Check("code_objects", "it runs another's", alone=False),
        workload=_RO,
    ),
    Fault(
        "worker-without-device",
        what="workers never make their GPU the current one",
        lost="stale outputs on every GPU but the first, with a UserWarning",
        rule=Rule("worker-without-device", "never sets its device"),
        gpus=2,
    ),
    Fault(
        "seeds-every-step",
        what="each worker seeds the process's default generators at every step",
        lost="random numbers that differ: every thread draws the same ones again",
        rule=Rule("global-seed-in-worker", "default generators of the whole process"),
    ),
    Fault(
        "synchronises-the-device",
        what="each worker waits for its whole device before a step",
        lost="captures of other workers on that GPU",
        rule=Rule("device-synchronize-in-worker", "waits for all streams of the device", warns=True),
    ),
    Fault(
        "marks-steps",
        what="each worker marks its steps for CUDAGraph Trees",
        lost="with trees: another worker's graph, between its forward and its backward",
        rule=Rule("mark-step-in-thread", "marks a step for the whole process"),
    ),
    Fault(
        "resets-the-compiler",
        what="a worker that ends resets the compiler",
        lost="the compiled code of all other workers, in the middle of the run",
        rule=Rule("global-reset-in-worker", "resets the compiler of the whole process"),
    ),
    Fault(
        "one-code-object-compiled",
        what="workers compile the step's function itself, not a copy with a code object of their own",
        lost="a worker trains on another's weights",
        rule=Rule("shared-code-object", "compiles the same code object", warns=True),
        cpu=Check("code_objects", "it runs another's"),
        cuda=Check("worker", "", alone=False),
        workload=_RO,
    ),
    Fault(
        "hides-compiler-errors",
        what="errors of the compiler become eager calls",
        lost="compiled steps and their graphs, in silence",
        rule=Rule("silent-eager", "turns an error of the compiler into an eager call"),
    ),
    Fault(
        "compiles-the-update",
        what="the update is compiled with CUDA graphs and without trees",
        lost="the first update: it happens twice",
        rule=Rule("compiled-optimizer-step", "the first call runs it for real"),
    ),
    Fault(
        "graphs-off",
        what="the strategy with CUDA graphs compiles without them",
        lost="the speed that was chosen, in silence",
        cuda=Check("cuda_graphs", "replays"),
        workload=_RO,
    ),
    Fault(
        "reloads-by-assignment",
        what="weights are loaded by assignment after the step was captured",
        lost="the run: graphs go on with the old weights",
        rule=Rule("weights-moved-after-capture", "gives a module other memory"),
        cpu=Check("worker", "", alone=False),
    ),
    Fault(
        "keeps-outputs",
        what="every step's output is kept for later",
        lost="all but the last: a graph writes each into the same memory",
        rule=Rule("output-kept-across-steps", "keeps an output of a CUDA graph"),
    ),
    Fault(
        "captures-in-the-global-mode",
        what="the update is captured in CUDA's global mode",
        lost="the capture, at any allocation of any thread",
        rule=Rule("global-capture-mode", "global mode", warns=True),
    ),
    Fault(
        "warm-up-update-kept",
        what="warm-up takes an update for real and does not take it back",
        lost="the start: one update on a blank batch is in it",
        cpu=Check("warm_up", "an update of it was kept"),
    ),
    Fault(
        "warm-up-moments-kept",
        what="the optimiser remembers the update of its warm-up",
        lost="the first steps",
        cpu=Check("warm_up", "is not zero after warm-up", alone=False),
    ),
    Fault(
        "gate-lets-all-in",
        what="the gate lets go of its lock before a worker builds",
        lost="workers, at random: captures break each other",
        cpu=Check("compile_gate", "began outside the gate", alone=False),
        workload=_RO,
    ),
    Fault(
        "one-pool-for-all",
        what="the graphs of all workers share one memory pool",
        lost="the numbers: one worker's graph writes over another's",
        cuda=Check("graph_pools", "private pools of graphs for"),
        workload=_WHOLE,
    ),
    Fault(
        "noise-from-the-default-generator",
        what="adds noise to the features, drawn from the device's default generator in each worker",
        lost="workers that capture meanwhile; and no run can be repeated",
        rule=Rule("default-generator-draw", "draws from a default generator"),
        cpu=Check("generators", "was drawn from", alone=False),
    ),
    Fault(
        "draws-in-warm-up",
        what="steps are warmed up on random features, and the generators put back",
        lost="workers that capture meanwhile, at random",
        cpu=Check("generators", "its warm-up drew from the default generator of cpu"),
        cuda=Check("generators", "its warm-up drew from the default generator of cuda:"),
    ),
    Fault(
        "shared-code-object",
        what="all workers compile one code object",
        lost="a worker trains on another's weights",
        cpu=Check("code_objects", "it runs another's", alone=False),
        workload=_RO,
    ),
    Fault(
        "recompiles-in-silence",
        what="the step counts its calls in a Python number, and nothing forbids to compile again",
        lost="all but the first steps: each compiles anew, then none is compiled",
        cpu=Check("recompiles", "compiles in the steady phase"),
        workload={"strategy": "default"},
    ),
    Fault(
        "captures-at-the-first-step",
        what="graphs are captured at the first step, when all workers run",
        lost="the capture of some workers, or of all",
        cuda=Check("cuda_graphs", "", alone=False, races=("worker",)),
        workload=_WHOLE,
    ),
)

_DATA = (
    Fault(
        "labels-shifted",
        what="labels are those of the slot before",
        lost="the drafter: it learns to repeat the anchor",
        cpu=Check("definition", "the label is not the token at"),
    ),
    Fault(
        "decay-forgotten",
        what="every slot of a block weighs the same",
        lost="first slots, on which acceptance hangs",
        cpu=Check("definition", "needed"),
    ),
    Fault(
        "blocks-see-their-anchor",
        what="a block sees the target's state at its own anchor",
        lost="the drafter: that state does not exist when it drafts",
        cpu=Check("definition", "sees key"),
    ),
    Fault(
        "rows-of-the-first-worker",
        what="every worker gets the first worker's rows",
        lost="the samples of every worker but one",
        cpu=Check("rows", "in the first step, and so does drafter 0"),
    ),
    Fault(
        "long-rows-not-cut",
        what="rows longer than the largest bucket are not cut",
        lost="the run, at the first long row",
        cpu=Check("rows", "StopIteration"),
        workload={"buckets": [16]},
    ),
    Fault(
        "blocks-see-each-other",
        what="a block sees the blocks before it",
        lost="the drafter: it trains on what it never has when it drafts",
        cpu=Check("definition", "sees key", alone=False),
    ),
)

_STEP = (
    Fault(
        "loss-forgets-the-weights",
        what="the reported loss counts every slot alike",
        lost="the curve by which the run is judged",
        cpu=Check("loss", "worst in loss"),
    ),
    Fault(
        "rounds-without-gradient",
        what="the drafter rounds to bfloat16 where no gradient is wanted",
        lost="the evaluation, which is then of another drafter",
        cpu=Check("outputs", "worst in hidden states"),
    ),
    Fault(
        "context-cut-at-the-first-bucket",
        what="blocks in the second bucket see no more context than the first bucket holds",
        lost="long contexts, which is what the drafter is for",
        cpu=Check("gradients", "worst in", alone=False),
        workload={"buckets": [20, 32]},
    ),
    Fault(
        "inputs-of-the-first-batch",
        what="inputs held for the graphs are not written again",
        lost="every sample but the first one's",
        cpu=Check("loss", "worst in loss", alone=False),
        workload=_RO,
    ),
    Fault(
        "takes-anothers-batch",
        what="workers share a cache of batches that forgets whose they are",
        lost="the samples of every worker but one",
        cpu=Check("outputs", "worst in hidden states", alone=False),
    ),
    Fault(
        "nan-in-one-worker",
        what="one worker's gradient is no number",
        lost="the weights, in one step",
        cpu=Check("worker", "gradient norm nan", alone=False),
    ),
    Fault(
        "gradient-forgets-the-weights",
        what="the gradient counts every slot alike, the loss does not",
        lost="the objective, while the loss looks right",
        cpu=Check("gradients", "worst in"),
    ),
    Fault(
        "fused-loss-a-little-short",
        what="the kernel of the loss on a GPU takes 0.9 from the label's probability, not 1",
        lost="a tenth of every gradient towards the right word",
        cuda=Check("gradients", "worst in"),
    ),
    Fault(
        "wrong-gradient-one-worker",
        what="one parameter's gradient is 1% too large in one worker",
        lost="a run that looks right",
        cpu=Check("gradients", "worst in fc.weight"),
    ),
    Fault(
        "wrong-from-step-2-on",
        what="one parameter's gradient is 1% too large from the second step on",
        lost="a run that looks right",
        cpu=Check("gradients", "at step 2"),
    ),
    Fault(
        "accumulation-keeps-the-last-only",
        what="each micro-batch overwrites the gradients of those before it",
        lost="all samples of a step but the last micro-batch's",
        cpu=Check("gradients", "worst in"),
        workload={"accumulation": 2},
    ),
    Fault(
        "gradients-not-zeroed",
        what="a step starts from the gradients of the step before",
        lost="the direction of every update but the first",
        cpu=Check("gradients", "at step 2"),
    ),
    Fault(
        "normaliser-of-one-worker",
        what="the loss is normalised by the worker's own weights, not by those of all",
        lost="the mean over all samples: the update depends on how they fell to workers",
        cpu=Check("gradients", "worst in"),
    ),
    Fault(
        "stats-not-copied",
        what="what a graph gives back is not copied",
        lost="the reported loss: every micro-batch of a step shows the last one's",
        cuda=Check("reported_loss", "copy what a graph gives back"),
        workload={**_RO, "accumulation": 2},
    ),
)

_EXCHANGE = (
    Fault(
        "average-leaves-one-out",
        what="the last replica's gradients are not in the sum",
        lost="that replica's samples, all of them",
        cpu=Check("exchange", "worst in"),
    ),
    Fault(
        "average-off-by-one",
        what="the sum is divided by the number of replicas less one",
        lost="the learning rate that was asked for, with more than two replicas",
        cpu=Check("exchange", "worst in"),
        workload={"drafter_threads": 3},
    ),
    Fault(
        "sums-in-own-order",
        what="every replica sums in an order of its own",
        lost="equal replicas: they drift apart by roundings",
        cpu=Check("replicas", "differs from the first replica's"),
        workload={"drafter_threads": 3},
    ),
    Fault(
        "sums-without-waiting",
        what="gradients are summed without waiting for the stream that computes them",
        lost="the samples of whoever is late, at random",
        cuda=Check("exchange", "worst in", alone=False),
        workload=_ONE_GPU,
    ),
    Fault(
        "updates-without-waiting",
        what="a worker takes its update without waiting for the sums of the others' streams",
        lost="equal replicas, at random",
        cuda=Check("parameters", "worst in", alone=False, races=("replicas",)),
        workload=_ONE_GPU,
    ),
    Fault(
        "leader-does-not-wait",
        what="between GPUs: the first worker on each adds up without waiting for the others there",
        lost="the samples of whoever is late, at random",
        cuda=Check("exchange", "worst in", alone=False),
        gpus=2,
        workload={"drafter_threads": 4},
    ),
    Fault(
        "mate-does-not-wait",
        what="between GPUs: a worker takes its update without waiting for the sum from the first worker on its GPU",
        lost="equal replicas, at random",
        cuda=Check("parameters", "worst in", alone=False, races=("replicas",)),
        gpus=2,
        workload={"drafter_threads": 4},
    ),
    Fault(
        "stream-of-the-first-gpu",
        what="every worker takes device and stream of the first GPU",
        lost="whatever runs on the others: their default stream is everybody's, and cannot be captured",
        cuda=Check("worker", "a stream of the thread's own", alone=False),
        gpus=2,
        workload=_WHOLE,
    ),
    Fault(
        "drifts-after-step-2",
        what="nothing is exchanged after the second step",
        lost="the run: replicas train apart, and one of them is saved",
        cpu=Check("exchange", "at step 3", alone=False),
        workload={"canary_steps": 3},
    ),
    Fault(
        "clips-before-the-exchange",
        what="each replica clips its own gradients",
        lost="the gradient: a sum of clipped ones points elsewhere",
        cpu=Check("gradients", "worst in"),
    ),
)

_UPDATE = (
    Fault(
        "clip-left-out",
        what="gradients are not clipped",
        lost="the run, at its first bad batch",
        cpu=Check("parameters", "worst in"),
    ),
    Fault(
        "no-float32-masters",
        what="bfloat16 parameters and moments are updated in place",
        lost="every update that is smaller than half a bfloat16 rounding",
        cpu=Check("parameters", "worst in"),
        workload=_BF16,
    ),
    Fault(
        "weight-decay-left-out",
        what="weights do not decay",
        lost="the weight decay that was asked for",
        cpu=Check("parameters", "worst in"),
    ),
    Fault(
        "update-applied-twice",
        what="the optimiser steps twice",
        lost="twice the learning rate that was asked for",
        cpu=Check("warm_up", "the optimiser counts 2 updates", alone=False),
    ),
    Fault(
        "weights-moved-after-warm-up",
        what="parameters get new memory after the step was built over the old one",
        lost="every update: optimiser and graphs go on with the old memory",
        cpu=Check("worker", "is not where it was when the step was built", alone=False),
    ),
    Fault(
        "rate-set-once",
        what="the learning rate is set at the first step only",
        lost="the schedule",
        cpu=Check("learning_rate", "step 2 was taken at learning rate"),
    ),
    Fault(
        "clock-of-its-own",
        what="each worker is a step ahead of the one before it in the schedule",
        lost="equal replicas, and the schedule",
        cpu=Check("learning_rate", "step 1 was taken at learning rate", alone=False),
    ),
    Fault(
        "rate-read-on-the-host",
        what="the update takes the learning rate as a number",
        lost="the capture of the update; or, captured, a rate that never changes",
        cuda=Check("worker", "could not be captured", alone=False),
        workload=_WHOLE,
    ),
    Fault(
        "fused-update-without-clip",
        what="the kernel of the update on a GPU does not clip",
        lost="the run, at its first bad batch",
        cuda=Check("parameters", "worst in"),
        workload=_BF16,
    ),
    Fault(
        "masters-not-copied-back",
        what="the first parameter is not copied back from its float32 master",
        lost="that parameter stays at its start",
        cpu=Check("parameters", "is not its master copy"),
        workload=_BF16,
    ),
)

_RUN = (
    Fault(
        "one-step-too-few",
        what="workers end one step early",
        lost="the last step, in silence",
        cpu=Check("moved", "1 of 2 steps"),
    ),
    Fault(
        "worker-dies",
        what="a worker raises at its first step",
        lost="the run, in the first minute of a job one walked away from",
        cpu=Check("worker", "this worker dies", alone=False),
    ),
    Fault(
        "worker-dies-at-the-end",
        what="a worker raises after its last step",
        lost="the last checkpoint",
        cpu=Check("worker", "this worker dies at the end"),
    ),
    Fault(
        "worker-hangs",
        what="a worker waits for ever",
        lost="days of GPU time",
        cpu=Check("watchdog", "not done after 15 s"),
        workload={"canary_timeout_s": 15},
    ),
    Fault(
        "checkpoint-rounded",
        what="weights are rounded to bfloat16 when they are saved",
        lost="the last digits of every checkpoint",
        cpu=Check("save_and_load", "is not in the file as it is in memory"),
    ),
    Fault(
        "checkpoint-torn",
        what="half of each file reaches the disk",
        lost="every checkpoint",
        cpu=Check("save_and_load", "unreadable"),
    ),
    Fault(
        "checkpoint-without-moments",
        what="the optimiser's first moments are not saved",
        lost="the optimiser's memory, at every resume",
        cpu=Check("checkpoint", "the optimiser's state of fc.weight is missing"),
    ),
    Fault(
        "checkpoint-without-second-moments",
        what="the optimiser's second moments are not saved",
        lost="the optimiser's memory, at every resume",
        cpu=Check("checkpoint", "the optimiser's state of fc.weight is missing: exp_avg_sq"),
    ),
    Fault(
        "checkpoint-of-stale-moments",
        what="the second moments in a checkpoint are those that the run began with",
        lost="the optimiser's memory, at every resume",
        cpu=Check("checkpoint", "exp_avg_sq.fc.weight is not in the file as it is in memory"),
    ),
    Fault(
        "memory-grows",
        what="a copy of every step's gradients is kept",
        lost="the run, out of memory after hours",
        cuda=Check("memory", "bytes more after step"),
    ),
    Fault(
        "checkpoint-without-masters",
        what="float32 master weights are not saved",
        lost="all that bfloat16 rounds away, at every resume",
        cpu=Check("checkpoint", "master copy of fc.weight is missing"),
        workload=_BF16,
    ),
    Fault(
        "report-forgets-a-worker",
        what="the written loss is the first worker's",
        lost="the curve by which the run is judged",
        cpu=Check("reported_loss", "was reported with loss"),
    ),
    Fault(
        "target-ahead-of-the-gate",
        what="a target thread makes its first batch before it passes the gate",
        lost="workers that capture meanwhile, at random",
        cpu=Check("rehearsal", "target-0 began its work before the gate opened"),
        cuda=Check("rehearsal", "target-0 began its work before the gate opened"),
    ),
    Fault(
        "features-in-the-targets-dtype",
        what="batches carry the target's dtype, not the drafter's",
        lost="the run, at its first step",
        cpu=Check("rehearsal", "to have the same dtype"),
        workload=_BF16,
    ),
    Fault(
        "target-reads-the-first-batch",
        what="the target's recorded forward never gets the next batch's tokens",
        lost="the drafter: every batch has the hidden states of one text",
        cuda=Check("rehearsal", "differ from eager code's"),
    ),
    Fault(
        "sigterm-not-heard",
        what="SIGTERM is not looked at between steps",
        lost="the work since the last checkpoint, when the host goes down",
        cpu=Check("sigterm", "completed at step 2"),
    ),
)

_PROOF = (
    Fault(
        "comparison-sees-nothing",
        what="the canary's tolerance is so wide that nothing is outside it",
        lost="the canary's word",
        cpu=Check("negative_control", "not noticed", inconclusive=True),
    ),
    Fault(
        "code-control-blind",
        what="the check of code objects counts those of other workers too",
        lost="that check's word",
        cpu=Check("control_code_objects", "not noticed", inconclusive=True),
        workload=_RO,
    ),
    Fault(
        "graph-control-blind",
        what="the check of replays counts one where there was none",
        lost="that check's word",
        cuda=Check("control_graphs", "counts as a replay", inconclusive=True),
        workload=_RO,
    ),
    Fault(
        "replicas-kept",
        what="the canary holds its replicas when the rehearsal begins",
        lost="the room that the run will have",
        cpu=Check("memory_back", "are still held"),
        cuda=Check("memory_back", "are still held"),
    ),
    Fault(
        "device-memory-kept",
        what="the canary holds half a GiB for each drafter, and no replica, when the rehearsal begins",
        lost="the room that the run will have",
        cuda=Check("memory_back", "bytes more than before the gate", warns=True),
        workload=_WHOLE,
    ),
)

FAULTS: tuple[Fault, ...] = (*_COMPILE, *_DATA, *_STEP, *_EXCHANGE, *_UPDATE, *_RUN, *_PROOF)

NO_FAULT = {
    "reference": "wants a GPU that is nearly full",
    "throughput": "wants a history of earlier canaries of the same GPU",
    "health": "wants a GPU that is ill",
    "xid": "the same",
}
"""Checks of the canary that no patch makes fail, and why."""
