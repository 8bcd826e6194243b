"""Guessed names: what Horovod, torch.distributed, mpi4py and others call things, and the name here.

Each table maps names to the end of a sentence. The errors stay AttributeError and TypeError, so
that ``hasattr`` and defaults of ``getattr`` work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

from dearmpi.errors import ArgumentError

P = ParamSpec("P")
T = TypeVar("T")


def _by_name(answers: Mapping[str, str]) -> Mapping[str, str]:
    """Each word of a key leads to that key's answer."""
    return {name: answer for names, answer in answers.items() for name in names.split()}


_CONNECT = "call world = dearmpi.connect()"
_WORLD = "with world = dearmpi.connect(), it is world."
_WRAP = (
    "leave the model as it is and call dearmpi.DistributedOptimizer(optimizer, model), which "
    "averages its gradients"
)
_COPIED = "leave it out: DistributedOptimizer copies rank 0's parameters and buffers to all ranks"
_LOAD = (
    "have every rank load the state, by the load_state_dict() of the optimizer or of the "
    "DistributedOptimizer"
)
_MEAN = "mean(x) for an average, or all_reduce(values, op) for a sum, maximum or minimum"
_OPERATION = 'give all_reduce the word: op="sum", "mean", "max" or "min"'
_END = "leave it out: the job ends with its scripts"
_MPI4PY = "from mpi4py import MPI has it, for MPI.COMM_WORLD and the main thread"
_GROUPS = (
    "groups of ranks are worlds: group = world.group(ranks), or world.split(color), has the same "
    "methods, and DistributedOptimizer(..., world=group) trains on its ranks"
)

PACKAGE = _by_name(
    {
        "init initialize init_process_group init_distributed init_distributed_context": _CONNECT,
        "setup Fabric Accelerator set_seed seed_everything": (
            f"{_CONNECT}, and wrap the optimizer: dearmpi.DistributedOptimizer(optimizer, model)"
        ),
        "mpi_built mpi_enabled nccl_built gloo_built gloo_enabled mpi_threads_supported "
        "cuda_built": "run dear-train doctor, which says what there is",
        "push_pull push_pull_async push_pull_inplace declare poll synchronize": (
            f"leave it out: backward and step() exchange the gradients; {_WORLD}{_MEAN}"
        ),
        "start_timeline stop_timeline": "set DEAR_TRACE=START:STOP, and run dear-train report",
        "save load save_checkpoint load_checkpoint": (
            "write torch.save of model.state_dict() and optimizer.state_dict(), or use dearmpi.Run"
        ),
        "is_initialized is_available": f"{_CONNECT}, at any time: it gives the same world again",
        "rank get_rank Get_rank process_index": f"{_WORLD}rank",
        "size world_size get_world_size Get_size num_ranks": f"{_WORLD}size",
        "local_rank get_local_rank": f"{_WORLD}local_rank",
        "local_size cross_rank cross_size get_local_size": f"{_WORLD}hosts, the host of each rank",
        "shutdown finalize destroy_process_group": _END,
        "DDP": "write from dearmpi import DistributedDataParallel as DDP",
        "DataParallel data_parallel prepare wrap replicate": _WRAP,
        "FSDP FullyShardedDataParallel fully_shard ZeroRedundancyOptimizer ZeRO": (
            f"{_WRAP} and keeps one share of the optimizer's state on each rank"
        ),
        "DistributedSampler": (
            "use torch.utils.data.DistributedSampler(data, num_replicas=world.size, "
            "rank=world.rank)"
        ),
        "allreduce allreduce_ all_reduce allreduce_async allreduce_async_ grouped_allreduce "
        "mean average reduce": f"{_WORLD}{_MEAN}",
        "allgather all_gather gather allgather_async": (
            f"{_WORLD}all_gather(buffer), or world.all_gather_object(x) for any object"
        ),
        "allgather_object all_gather_object gather_object": f"{_WORLD}all_gather_object(x)",
        "broadcast_object broadcast_object_list bcast": f"{_WORLD}broadcast_object(x)",
        "broadcast broadcast_ broadcast_async": (
            f"{_WORLD}broadcast(buffer), or dearmpi.broadcast_parameters(model) for a whole model"
        ),
        "broadcast_model broadcast_variables sync_params": _COPIED,
        "broadcast_optimizer_state broadcast_state": _LOAD,
        "barrier Barrier": f"{_WORLD}barrier()",
        "join": "write with optimizer.join(): around the loop",
        "no_sync": "write with optimizer.no_sync(): around all backwards of a step but the last",
        "clip_grad_norm clip_grad_norm_": "call optimizer.clip_grad_norm_(max_norm)",
        "Compression": 'give DistributedOptimizer comm_dtype="bf16", or "fp16"',
        "Average Sum Min Max Product Adasum ReduceOp": _OPERATION,
        "convert_sync_batchnorm_ convert_syncbn_model SyncBatchNormalization": (
            "call model = dearmpi.convert_sync_batchnorm(model)"
        ),
        "alltoall all_to_all reducescatter reduce_scatter send recv scatter": _MPI4PY,
        "new_group process_set ProcessSet add_process_set ProcessGroup": _GROUPS,
        "Plan": "write from dearmpi.plan.data.plan import Plan",
        "read_plan load_plan": "write from dearmpi.plan.data.plan import read_plan",
        "DearError ConfigError ArgumentError TaskError LaunchError MismatchError DataError "
        "CheckpointError NonFiniteLossError DeviceError UsageError CommError StallError "
        "ReplicaMismatchError WireRangeError": "import it from dearmpi.errors",
        "run launch train elastic Trainer TrainerState": (
            "start dear-train run, or a script, by mpirun"
        ),
    }
)
"""Attributes of the package."""

WORLD = _by_name(
    {
        "Get_rank get_rank process_index global_rank rank_": "it is world.rank",
        "Get_size get_size get_world_size world_size num_ranks num_processes size_": (
            "it is world.size"
        ),
        "get_local_rank local_process_index": "it is world.local_rank",
        "local_size get_local_size local_world_size": "it is world.hosts.count(world.host)",
        "cross_size cross_rank num_nodes node_rank group_rank": (
            "it follows from world.hosts, the host of each rank"
        ),
        "is_local_main_process is_local_master": "it is world.local_rank == 0",
        "is_initialized": "leave it out: a world is connected from dearmpi.connect() on",
        "backend get_backend": "leave it out: a world speaks MPI",
        "hostname node Get_processor_name get_host name": "it is world.host, or world.hosts",
        "is_main_process is_main is_master is_rank_0 is_rank_zero is_global_zero": (
            "it is world.is_root"
        ),
        "allreduce Allreduce allreduce_ all_reduce_ push_pull reduce Reduce sum max min "
        "grouped_allreduce": (f"call world.{_MEAN}"),
        "average avg reduce_mean all_reduce_mean": "call world.mean(x)",
        "bcast broadcast_obj broadcast_object_ broadcast_object_list": (
            "call world.broadcast_object(x, root=0)"
        ),
        "Bcast broadcast_tensor broadcast_": "call world.broadcast(buffer, root=0)",
        "allgather gather gather_object gather_objects allgather_object all_gather_objects": (
            "call world.all_gather_object(x)"
        ),
        "Allgather Gather all_gather_into_tensor all_gather_tensor": (
            "call world.all_gather(buffer), with a buffer of world.size shards"
        ),
        "gather_text allgather_text all_gather_texts": "call world.all_gather_text(text)",
        "Barrier synchronize wait wait_for_everyone sync": "call world.barrier()",
        "Abort abort_ exit": "call world.abort(code), or raise an error",
        "shutdown finalize Finalize Free destroy Disconnect disconnect": _END,
        "device": 'it is torch.device("cuda", world.local_rank) where a rank has a device',
        "print print_once": "write if world.is_root: print(...)",
        "Split Split_type Create_group Dup Clone new_group subgroup process_group": _GROUPS,
        "send recv Send Recv isend irecv Isend Irecv sendrecv Sendrecv scatter Scatter alltoall "
        "Alltoall all_to_all reduce_scatter reduce_scatter_tensor Reduce_scatter Scan scan "
        "py2f": _MPI4PY,
    }
)
"""Attributes of a World."""

OPTIMIZER = _by_name(
    {
        "clip_grad_norm clip_gradients clip_master_grads unscale_and_clip": (
            "call optimizer.clip_grad_norm_(max_norm)"
        ),
        "clip_grad_value_ clip_grad_value": (
            'call optimizer.clip_grad_norm_(max_norm), or choose gather="gradients" and call '
            "optimizer.keep_gradients() before torch's"
        ),
        "get_global_grad_norm grad_norm get_grad_norm": (
            "it is what optimizer.clip_grad_norm_(max_norm) returns; inf clips nothing"
        ),
        "unscale_ unscale scale_loss loss_scale": (
            "use dearmpi.GradScaler, as torch's: scaler.scale(loss).backward(), "
            "scaler.unscale_(optimizer)"
        ),
        "broadcast_optimizer_state": _LOAD,
        "save save_checkpoint load load_checkpoint": (
            "save what optimizer.state_dict() returns on every rank; optimizer.load_state_dict() "
            "takes it"
        ),
        "train_batch": "call loss.backward() and optimizer.step()",
        "wait finish flush synchronize_ wait_all": "call optimizer.synchronize()",
        "set_to_none": "call optimizer.zero_grad(set_to_none=False)",
        "register_comm_hook": ('give DistributedOptimizer comm_dtype="bf16", or compress="int8"'),
        "prepare": "leave it out: it is attached to its model from the start",
        "skip_synchronize": (
            "leave it out: optimizer.clip_grad_norm_(max_norm) and optimizer.step() wait for the "
            "gradients they need"
        ),
        "backward": "call loss.backward()",
        "sync allreduce all_reduce push_pull average_gradients sync_gradients reduce_gradients "
        "allreduce_gradients all_reduce_gradients finish_gradient_synchroni"
        "zation": "leave it out: backward and step() exchange the gradients",
        "accumulate no_backward_sync is_gradient_accumulation_boundary "
        "gradient_accumulation_steps set_backward_passes_per_step require_backward_grad_sync": (
            "write with optimizer.no_sync(): around all backwards of a step but the last"
        ),
        "consolidate consolidate_state_dict full_state_dict full_optim_state_dict "
        "gather_full_optim_state_dict": (
            "call optimizer.state_dict() on every rank, which gives the whole state"
        ),
        "sharded_state_dict local_state_dict": "call optimizer.local_state()",
        "scale_gradients mul_grads": "call optimizer.scale_gradients_(factor)",
        "rank": "it is optimizer.world.rank",
        "size world_size": "it is optimizer.world.size",
        "module model": "use the model that was given to DistributedOptimizer",
        "optimizer optim inner": "use the optimizer that was given to DistributedOptimizer",
    }
)
"""Attributes of a DistributedOptimizer."""

_MODEL = "give the model itself: DistributedOptimizer(optimizer, model)"
_AVERAGED = (
    "leave it out: gradients are averaged; call optimizer.scale_gradients_(factor) before step() "
    "for another factor"
)
_UNNEEDED = "leave it out: unused parameters and the order of backward need no setting"
_LAUNCHER = "leave it out: the launcher, such as mpirun -n 4, decides"
_INNER = "give it to the torch optimizer that DistributedOptimizer wraps"
_SHARDED = (
    'choose gather="parameters", which keeps one share of the optimizer\'s state on each rank, or '
    '"gradients"'
)

LOCAL_SETTINGS = _by_name(
    {
        "local_steps period H inner_steps num_inner_steps num_local_steps frequency": (
            "sync_every=50 is the number of steps from one exchange to the next"
        ),
        "fragment_sync_delay sync_delay": "delay=5 is the number of steps an exchange may take",
        "fragment_update_alpha alpha": "mix=0.5 is the part of its own values that a rank keeps",
        "should_quantize quantize compression": 'compress="int4", "int8" or "none" is what travels',
        "model_fragments num_fragments sync_fragments": "fragments=8 is their number",
        "outer_optimizer outer_optim": (
            "outer_lr=0.7 and outer_momentum=0.8 are those of the outer SGD"
        ),
        "warmup_steps": "sync_after=1000 averages gradients in each step until then",
        "inner_optimizer optimizer": "give it as the first argument, without a name",
        "manager backup_device pin_memory use_bucketization bucket_cap_mb": (
            "leave it out, or give config=dearmpi.EngineConfig(...)"
        ),
    }
)
"""Arguments of a LocalOptimizer, by torchft, OpenDiLoCo and torch's PeriodicModelAverager."""

SETTINGS = _by_name(
    {
        "named_parameters params parameters module": _MODEL,
        "root_rank root src": _COPIED,
        "average op average_gradients gradient_average gradient_predivide_factor prescale_factor "
        "postscale_factor": _AVERAGED,
        "compression fp16 bf16 amp mixed_precision reduce_dtype fp16_allreduce grad_dtype "
        "gradient_compression wire_dtype comm_hook hook gather_dtype "
        "communication_data_type param_dtype dtype": (
            'comm_dtype="bf16", or "fp16", sends half the bytes, compress="int8" or "int4" fewer'
        ),
        "quantize should_quantize zero_quantized_gradients zero_quantized_weights quantization": (
            'compress="int8", or "int4", quantizes gradients and parameters on their way'
        ),
        "backward_passes_per_step gradient_accumulation_steps accumulation_steps accumulate": (
            "write with optimizer.no_sync(): around all backwards of a step but the last"
        ),
        "process_group group comm communicator process_set": (
            "it is world= here, which takes what dearmpi.connect(), world.group(ranks) or "
            "world.split(color) returns"
        ),
        "device_ids output_device device device_id": (
            "leave it out, and move the model to its device before: "
            'model.to(f"cuda:{world.local_rank}")'
        ),
        "find_unused_parameters static_graph check_reduction allow_unused "
        "skip_all_reduce_unused_params delay_all_reduce_named_params": _UNNEEDED,
        "gradient_as_bucket_view parameters_as_bucket_view": (
            "leave it out: gradients lie in the buckets where they can"
        ),
        "broadcast_buffers sync_buffers forward_sync_buffers": (
            'it is buffers="broadcast" here, or "average", or "keep"'
        ),
        "init_sync broadcast_parameters": _COPIED,
        "bucket_size bucket_size_mb bucket_cap bucket_bytes fusion_threshold threshold "
        "tensor_fusion_threshold fusion_threshold_mb bucket_bytes_cap reduce_bucket_size "
        "allgather_bucket_size bucket_cap_mb_list": (
            "bucket_cap_mb=4 makes buckets of about 4 MiB"
        ),
        "num_groups groups": "bucket_cap_mb= or plan= decides which gradients travel together",
        "sparse_as_dense": "build the embedding with sparse=False",
        "max_norm max_grad_norm clip_grad_norm clip gradient_clip_val gradient_clipping "
        "grad_clip": ("call optimizer.clip_grad_norm_(max_norm) before step()"),
        "cpu_offload offload offload_optimizer": (
            'update_on="host" keeps the state of a device\'s parameters in host memory'
        ),
        "world_size size rank local_rank backend": _LAUNCHER,
        "cycle_time nstreams num_streams async_op verbose": (
            "leave it out: communication runs on a thread of its own"
        ),
        "sync_batchnorm sync_bn": "call dearmpi.convert_sync_batchnorm(model) before",
        "overlap overlap_comm overlap_grad_reduce overlap_param_gather overlap_with_ddp": (
            'schedule="dear" overlaps communication with backward and forward, "wfbp" with '
            'backward, "serial" with nothing'
        ),
        "sharding_strategy zero_stage stage reshard_after_forward shard": _SHARDED,
        "optimizer_class lr momentum weight_decay betas eps nesterov": _INNER,
        "progress": "give it to connect: dearmpi.connect(progress=...)",
        "stall_limits timeout": (
            "give it to connect: dearmpi.connect(stall_limits=dearmpi.StallLimits(...))"
        ),
    }
)
"""Arguments of DistributedOptimizer."""

CONNECTION = _by_name(
    {
        "backend init_method rank world_size size ranks store local_rank": _LAUNCHER,
        "timeout": "give stall_limits=dearmpi.StallLimits(warning_s, abort_s)",
        "mode progress_mode": 'give progress="thread" or "poll"',
    }
)
"""Arguments of ``connect``."""

_ROOT = _by_name({"root_rank src source from_rank": "it is root= here"})
BROADCAST = {
    **_ROOT,
    **_by_name({"process_set group process_group": _GROUPS}),
    **_by_name({"params parameters named_parameters module": "give the model itself"}),
}
"""Arguments of ``broadcast_parameters`` and its like."""

COLLECTIVE = _by_name(
    {
        "root_rank src source from_rank dst": (
            "it is root= in world.broadcast and world.broadcast_object; every other call gives all "
            "ranks its result"
        ),
        "average": 'call world.mean(x), or world.all_reduce(x, op="mean")',
        "reduce_op reduction operation": _OPERATION,
        "process_set group process_group comm": _GROUPS,
        "async_op": "leave it out: a call of world waits, and gradients travel meanwhile anyhow",
        "tensor tensors tensor_list obj object_list sendbuf sendobj data array": (
            "give what is exchanged as the first argument, without a name"
        ),
    }
)
"""Arguments of the collective calls of a World."""


def answer_guess(owner: str, name: str, guesses: Mapping[str, str]) -> str | None:
    """The sentence for ``name``, which ``owner`` does not have; None if it is in no table."""
    answer = guesses.get(name)
    return None if answer is None else f"{owner} has no {name}: {answer}"


def answers_guesses(
    owner: str, guesses: Mapping[str, str]
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function answer guessed keywords, before Python finds others missing.

    It then raises ArgumentError, which is a TypeError and a ConfigError.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in kwargs:
                if name in guesses:
                    raise ArgumentError(
                        f"{owner} has no argument {name}: {guesses[name]}", code="unknown-argument"
                    )
            return function(*args, **kwargs)

        return checked

    return decorate
