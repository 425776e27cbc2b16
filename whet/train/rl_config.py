"""The configuration of `whet rl`, what it refuses, and its plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from whet.algo.config import AlgoConfig, OffPolicyConfig, ValueConfig, check_combination
from whet.config import align
from whet.generate.backends.base import SamplerConfig
from whet.generate.policy import PolicyConfig
from whet.generate.sampling import SamplingParams
from whet.model.lora.side import LoRAConfig
from whet.ranks.fsdp import ParallelConfig
from whet.ranks.ray import ClusterConfig
from whet.rewards.base import JUDGE, MODEL, TIMEOUT_S, check_timeout, parse_own
from whet.rewards.judge.judge import JudgeConfig
from whet.tasks.base import TaskConfig
from whet.telemetry.trackers import TrackConfig
from whet.train.objective.teacher import TeacherConfig
from whet.train.optim.safety import SafetyConfig
from whet.train.optim.step import OptimConfig
from whet.train.rollout.curriculum import CurriculumConfig
from whet.train.rollout.overlap import OverlapConfig, check_overlap
from whet.train.rollout.rollout import RolloutParams
from whet.train.rollout.self_play import SelfPlayConfig
from whet.types import UnreadError


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    """Reinforcement learning with verifiable rewards: on-policy, one update per batch, unless told otherwise."""

    out: str
    """Run folder to make."""
    policy: PolicyConfig
    """The model to start from."""
    task: TaskConfig = field(default_factory=TaskConfig)
    """The problems."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    """Which of the task's problems are trained on."""
    self_play: SelfPlayConfig = field(default_factory=SelfPlayConfig)
    """Chess: positions from the policy's own games beside the task's."""
    rewards: dict[str, float] = field(default_factory=lambda: {"correct": 1.0, "format": 0.1})
    """Weight of each built-in reward by name; 'episode' is what the task's environment pays."""
    reward: tuple[str, ...] = ()
    """Rewards of your own: path.py:function, weight 1, or path.py:function=0.5."""
    reward_timeout_s: float = TIMEOUT_S
    """Seconds that one call of a reward of your own may take; a longer one gives no score. Calls run in parallel."""
    reward_model: str = ""
    """Reward model whose score is the reward 'model', of weight 1 unless rewards.model says otherwise: run folder of
    whet dpo --loss reward, folder or hub name of a sequence classifier with one label."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    """The language model behind the reward 'judge'; a held-out gold metric stops the run where the two part."""
    control: Literal["none", "random_reward"] = "none"
    """random_reward: a coin decides every reward. What then still rises was not learned from rewards."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """How rollouts are drawn; with filters (top-k, top-p, min-p) the trained log-probabilities are renormalised over
    what the sampler kept of each token's distribution."""
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    """The objective."""
    off_policy: OffPolicyConfig = field(default_factory=OffPolicyConfig)
    """What is done when the policy that sampled is not the one that is trained."""
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    """Where completions come from: the policy's own engine, or a sampler with a copy of its weights."""
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    """What runs at the same time in a step."""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """A teacher that the samples are pulled to, beside the rewards or alone."""
    value: ValueConfig = field(default_factory=ValueConfig)
    """The critic; read with algo.baseline = value."""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """Adapters that are trained in place of the weights."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-6, schedule="constant", beta2=0.99))
    """Optimizer, schedule and precision."""
    kept_gib: float = 2.0
    """Memory, in GiB, for what the sampler computes of each token: an on-policy update with the C++ kernels then needs
    no forward pass of its own. A step that would need more keeps nothing; 0 disables."""
    num_steps: int = 100
    """Rollout batches; each gives num_minibatches * num_epochs optimizer updates, 1 unless told otherwise."""
    num_prompts: int = 32
    """Problems per step, over all ranks."""
    group_size: int = 8
    """Samples per problem."""
    validation_problems: int = 0
    """Problems of the dev split that are answered greedily while training; 0 for none."""
    validation_samples: int = 1
    """Answers per problem that are sampled besides, at the rollouts' temperature, for pass@1."""
    validate_every: int = 20
    """Steps between validations; the best is kept as checkpoints/best."""
    save_every: int = 100
    """Steps between checkpoints (one at the end always)."""
    preflight: Literal["stop", "warn"] = "stop"
    """What a failure of the short audit before the run does: stop it, or only be shown."""
    ratio_tolerance: float = 0.0
    """Largest |ratio - 1| accepted on-policy where the start-up probe says exact; more stops the run."""
    max_dead_steps: int = 50
    """Steps in a row without any reward difference after which the run stops."""
    show_samples_every: int = 0
    """Steps between completions that are printed while it trains, one each; 0 for none."""
    safety: SafetyConfig = field(default_factory=SafetyConfig)
    """Resuming, saving and stopping."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How several ranks hold the model."""
    track: TrackConfig = field(default_factory=TrackConfig)
    """Experiment trackers that show the run besides its own files."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Processes that share the work, started by Ray."""
    seed: int = 0
    """Seed of data order and of every sample."""

    def __post_init__(self) -> None:
        if self.reward_model and MODEL not in self.rewards:
            object.__setattr__(self, "rewards", {**self.rewards, MODEL: 1.0})
        if MODEL in self.rewards and not self.reward_model:
            raise ValueError("rewards.model needs reward_model: name the model that scores")
        for name in (
            "num_steps",
            "num_prompts",
            "group_size",
            "validate_every",
            "save_every",
            "max_dead_steps",
            "validation_samples",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 1 or more")
        for name in ("validation_problems", "ratio_tolerance", "show_samples_every"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 0 or more")
        if self.value.warmup_steps >= self.num_steps:
            raise ValueError(
                f"value.warmup_steps = {self.value.warmup_steps}: expected below num_steps = {self.num_steps}, or the "
                "policy is never trained"
            )
        check_timeout(self.reward, self.reward_timeout_s)
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature = 0: greedy rollouts have no ratio and no variety; use 1.0 for training"
            )
        if self.algo.ref_ema is not None and self.optim.precision.endswith("_master"):
            raise ValueError(
                f"algo.ref_ema with optim.precision = {self.optim.precision}: 16 bits cannot hold its small moves; use "
                "ref_refresh_every, or float32 parameters"
            )
        if self.validation_samples > 1 and not self.validation_problems:
            raise UnreadError(
                "validation_samples is read with validation_problems; leave it out, or give some",
                "validation_samples",
            )
        self._check_self_play()
        self._check_judge()
        self._check_teacher()
        self._check_sampler()
        check_combination(
            self.algo,
            self.off_policy,
            self.value,
            num_prompts=self.num_prompts,
            group_size=self.group_size,
            weights=self.reward_weights,
            num_steps=self.num_steps,
            max_new_tokens=self.sampling.max_new_tokens,
        )
        check_overlap(self.overlap, self.off_policy, self.optim)
        if (self.parallel.kind == "fsdp" or self.parallel.tensor > 1) and self.overlap.mode != "off":
            setting = "kind = fsdp" if self.parallel.kind == "fsdp" else f"tensor = {self.parallel.tensor}"
            raise ValueError(
                f"overlap.mode = {self.overlap.mode} with parallel.{setting}: the weights are gathered for one phase "
                "at a time; leave one out"
            )
        self._check_cluster()

    def _check_cluster(self) -> None:
        """Refuse what processes that sample elsewhere cannot do."""
        if not self.cluster.rollout_workers:
            return
        if self.sampler.kind != "engine":
            raise ValueError(
                f"cluster.rollout_workers with sampler.kind = {self.sampler.kind}: those workers are whet's engine; "
                "leave one out"
            )
        if self.parallel.gather == "layer":
            raise ValueError(
                "cluster.rollout_workers with parallel.gather = layer: workers have whole weights; use whole"
            )
        if self.kept_gib != RLConfig.kept_gib:
            raise UnreadError(
                "kept_gib is not read with cluster.rollout_workers: what they compute stays with them; leave it out",
                "kept_gib",
            )
        if self.optim.compile:
            raise ValueError(
                "cluster.rollout_workers with optim.compile: compiled layers cannot be sent to other processes; leave "
                "one out"
            )
        if self.cluster.partial and self.overlap.mode != "async":
            raise ValueError(
                "cluster.partial = true: sequences meet new weights only where they are drawn during updates; set "
                "overlap.mode = async and off_policy.staleness to 1 or more"
            )
        if self.cluster.partial and self.off_policy.router_replay:
            raise ValueError(
                "cluster.partial = true with off_policy.router_replay: the experts of a sequence come from one version "
                "of the weights; leave one out"
            )

    def _check_self_play(self) -> None:
        """Refuse games that nobody asks for, and those whose moves come late or from several processes."""
        if not self.self_play.share:
            if self.self_play != SelfPlayConfig():
                raise UnreadError(
                    "self_play.* is read with self_play.share above 0 only; leave it out", "self_play"
                )
            return
        if self.overlap.mode != "off" or self.off_policy.staleness or self.cluster.rollout_workers:
            raise ValueError(
                "self_play.share with overlap, off_policy.staleness or cluster: a game's next position is known when "
                "its step is sampled; leave one out"
            )

    def _check_judge(self) -> None:
        """Refuse a judge that nobody asks, and one that nobody watches."""
        if JUDGE not in self.rewards:
            if self.judge != JudgeConfig():
                told = "judge.* is read with rewards.judge only; give it a weight, or leave it out"
                raise UnreadError(told, "judge")
        elif not self.judge.model:
            raise ValueError("rewards.judge needs judge.model: name the model that judges")
        elif not self.validation_problems:
            raise ValueError(
                "rewards.judge needs validation_problems: judges are pleased sooner or later, and only held-out right "
                "answers show it; expected 1 or more (200 is good)"
            )

    def _check_teacher(self) -> None:
        """Refuse settings under which a teacher would teach nothing, or something else."""
        if not self.teacher.is_given:
            return
        if self.algo.uninformative != "keep":
            raise ValueError(
                f"algo.uninformative = {self.algo.uninformative} with a teacher: groups of equal rewards carry its "
                "signal, too; set it to keep"
            )
        if self.teacher.url and self.sampling.temperature != 1:
            raise ValueError(
                f"sampling.temperature = {self.sampling.temperature} with teacher.url: a server scores at temperature "
                "1; sample at 1, or load the teacher here (teacher.init)"
            )
        if self.algo.surrogate == "geometric" and self.teacher.kind == "sampled":
            raise ValueError(
                "teacher.kind = sampled with algo.surrogate = geometric: it clips by the sign of one advantage per "
                "completion, a teacher gives one per token; use clip"
            )

    def _check_sampler(self) -> None:
        """Refuse what only the policy's own engine gives, or computes."""
        kind = self.sampler.kind
        if kind == "engine":
            return
        if self.off_policy.router_replay:
            raise ValueError(
                f"off_policy.router_replay with sampler.kind = {kind}: only whet's own engine says which experts its "
                "tokens went to; leave it out"
            )
        if self.sampler.sleep == 2 and (self.off_policy.staleness or self.overlap.mode != "off"):
            raise ValueError(
                "sampler.sleep = 2 with off_policy.staleness or overlap.mode: it drops weights that later rollouts are "
                "drawn with; use 1"
            )
        if self.parallel.gather == "layer":
            raise ValueError(
                f"parallel.gather = layer with sampler.kind = {kind}: its copy is made of whole weights; use whole"
            )
        if self.kept_gib != type(self).__dataclass_fields__["kept_gib"].default:
            raise UnreadError(f"kept_gib is not read with sampler.kind = {kind}; leave it out", "kept_gib")

    @property
    def rollout(self) -> RolloutParams:
        """How groups are sampled and scored."""
        return RolloutParams(
            group_size=self.group_size,
            sampling=self.sampling,
            overlong=self.algo.overlong,
            overlong_cache=self.algo.ramp(self.sampling.max_new_tokens),
            random_reward=self.control == "random_reward",
        )

    @property
    def reward_weights(self) -> dict[str, float]:
        """Weight of everything that adds to a sample's reward, by name."""
        own = {name: weight for _, name, weight in map(parse_own, self.reward)}
        weights = {"random": 1.0} if self.control == "random_reward" else dict(self.rewards) | own
        return weights | ({"overlong": 1.0} if self.algo.overlong in ("soft", "hard") else {})


def plan(config: RLConfig) -> str:
    """Describe the batch of a step without doing it."""
    samples = config.num_prompts * config.group_size
    tokens = samples * config.sampling.max_new_tokens
    budget = config.optim.token_budget
    return align(
        "batch of one step",
        {
            "prompts": config.num_prompts,
            "samples per prompt": config.group_size,
            "completions": samples,
            "new tokens, at most": tokens,
            "tokens per micro-batch": budget,
            "micro-batches, at most": f"{-(-tokens // budget)}, and more by the share of prompts",
            "optimizer updates": f"{config.num_steps * config.algo.num_updates:,}, {config.algo.num_updates} per batch",
            "completions in all": samples * config.num_steps,
        },
    )
