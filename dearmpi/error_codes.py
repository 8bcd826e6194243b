"""Error codes: every fault that dearmpi reports, with its cause and its cure.

``DearError.code`` is a key of ``CODES``. The reference of errors is generated from this file, which
nothing imports while a program runs. A code is two to four words in lower case, joined by hyphens.
It names the fault rather than the place. One code serves all places that report the same fault.
"""

from __future__ import annotations

from typing import NamedTuple


class ErrorCode(NamedTuple):
    """What a code means: one sentence of cause, one of cure, for people who look it up."""

    cause: str
    cure: str


# A line with the code, then one with the cause and one with the cure.
_TABLE = """\
# settings
unnamed
    A program raised the error without a code.
    Read the message; dearmpi itself always gives a code.
unknown-choice
    A setting has a value that is none of its choices.
    Choose one of the values that the message lists.
wrong-type
    A setting or an argument has a value of the wrong type.
    Give a value of the type that the message names.
out-of-range
    A number lies outside the range that its setting allows.
    Give a number within the range that the message states.
settings-contradict
    Two settings exclude each other.
    Change or remove one of the two settings that the message names.
steps-inconsistent
    The steps of a collective name a rank, a shard, a chunk or a step that there is not.
    Mend the steps; the message names the place.
steps-wrong
    The steps of a collective end with wrong shards, or leave a rank waiting for ever.
    Mend the steps; the message names rank and step.
topology-misfit
    The sizes of a topology are not those of the job, or a host is in no rack of its file.
    Give sizes whose product is the number of ranks, or `hosts`; add the host to the file.
unknown-argument
    A function was called with an argument of another library's interface.
    Use the argument or method that the message names instead.
# comm
mpi-not-loaded
    A launcher started several ranks, or `comm` was given, but no MPI library can be loaded.
    Install one with `pip install "dearmpi[mpich]"`, or load the site's MPI module.
mpi-not-started
    The MPI library ended the process while it started, with a message of its own before.
    Use the `mpirun` that belongs to the library; unset variables of a launcher that is not there.
launcher-mismatch
    Several processes were started, but MPI sees each of them as a world of its own.
    Start them with the `mpirun` that belongs to the MPI library, or with the right `srun --mpi`.
connect-in-worker
    A process that a rank started, such as a data loader's worker, called `connect()`.
    Put the code that starts training under `if __name__ == "__main__":`.
connected-differently
    A later `connect()` asked for another way of progress than the first one.
    Choose `progress` at the first `connect()` of the process.
operation-failed
    An operation failed on a rank; the message ends with what the library reported.
    Read the last line of the message, and start the job again from a checkpoint.
communication-interrupted
    An exception such as `KeyboardInterrupt` interrupted an operation in the middle.
    Let signal handlers set a flag only, or use `progress="thread"`.
channel-not-opened
    MPI could not make a communicator for another channel or group.
    Call `close()` on every unneeded `DistributedOptimizer`; make each group once, not per step.
world-closed
    Something waited for communication after its world was closed.
    Finish training before `world.leave()`, `world.close()` or `MPI.Finalize()`.
wait-timed-out
    A wait for other ranks lasted longer than the stall limit.
    Read in the report what each rank does; raise the limit if a rank is only slow.
ranks-out-of-step
    A rank waits for an operation that another rank will never join.
    Give every rank as many batches, or use `optimizer.join()`; make the same calls on all ranks.
ranks-in-different-calls
    Ranks made different collective calls at the same time.
    Make the same collective calls on every rank, in the same order.
wait-on-progress-thread
    Code on the progress thread waited for communication, which only this thread completes.
    Let the optimizer's step read the parameters of its param groups, not those of the model.
wait-in-signal-handler
    A signal handler waited for communication that it had interrupted.
    Let the handler set a flag, and act on it after the step; or use `progress="thread"`.
wait-in-fork
    A process that was forked from a rank waited for communication.
    Call `optimizer.synchronize()` before the fork, and train in new processes.
buffer-not-contiguous
    A tensor to be sent is not contiguous in memory.
    Pass a contiguous copy, and copy the result back.
buffer-not-divisible
    A tensor cannot be cut into equal shards for all ranks.
    Pad the tensor to a multiple of the world size.
values-not-flat
    Values to be reduced have more than one dimension.
    Give the values as one flat list.
object-not-sent
    An object cannot be pickled, or is too large for one message.
    Send plain values, lists, dicts or tensors, in parts if they are large.
object-not-read
    A rank cannot unpickle an object that another rank sent.
    Install the same modules in the same versions on every host.
# engine
read-of-stale-parameter
    A forward read a parameter that was perhaps still being gathered, past its module.
    Read the parameter as an attribute of its module, or call `optimizer.synchronize()` first.
parameter-written-too-early
    A script changed a parameter in place after `step()`, while its new value was under way.
    Call `optimizer.synchronize()` first, or take the parameter from its module at that moment.
join-misused
    `join()` was nested, left before `step()`, or used with what a rank without batches cannot do.
    Call `step()` before the block ends, and use only what the message allows inside `join()`.
ranks-differ-in-options
    Param groups have other options, such as learning rates, on some ranks.
    Set the same options on every rank; give every scheduler the same values.
replicas-differ
    After a step a parameter or buffer has other values on some ranks.
    Change parameters through the optimizer only, or in the same way on every rank.
ranks-freeze-differently
    Ranks train different parameters in one step.
    Freeze and unfreeze the same parameters on every rank; use one seed where the choice is random.
ranks-differ-in-backwards
    Some ranks reduced gradients more often than others before a step.
    Skip a step on all ranks or on none, and decide before its backward.
ranks-change-gradients-differently
    Ranks clipped or scaled gradients by other factors, or other gradients.
    Clip and scale gradients through the optimizer, with the same numbers on every rank.
ranks-loaded-different-states
    Ranks called `load_state_dict()` at other steps or with other states.
    Load the same state on every rank before the same step.
gradient-in-reduction
    A gradient was read or changed while it was being reduced over the ranks.
    Use `optimizer.gradients()`, `clip_grad_norm_()` or `scale_gradients_()` after backward.
beyond-half-precision
    A gradient or parameter is beyond the range of fp16, in which it travels.
    Use `comm_dtype="bf16"`, or `dearmpi.GradScaler`, which skips such steps.
optimizer-step-failed
    The wrapped optimizer's own `step()` raised an exception on the progress thread.
    Correct what the traceback names, and start the job again from a checkpoint.
several-devices
    The optimizer's parameters lie on more than one device.
    Move the whole model to one device, and start one rank for each device.
device-not-served
    The parameters are on a kind of device that dearmpi does not serve.
    Move the model to `cpu` or `cuda` before the optimizer is made.
device-memory-full
    A device has no memory left for buckets, state or a step.
    Use a smaller model or batch, fewer ranks on the device, or `update_on="host"`.
device-failed
    A CUDA device reported an error.
    Look for the error in `nvidia-smi` and `dmesg` on the named host, and resume from a checkpoint.
host-memory-not-pinned
    Host memory cannot be pinned for copies from and to a device.
    Make `window` or `bucket_cap_mb` smaller, or leave out `update_on="host"`.
no-direct-cuda-buffers
    `cuda_buffers="direct"` was set, but MPI cannot work on device memory.
    Use `cuda_buffers="staged"`, or an MPI library that was built with CUDA.
mpi-lacks-threads
    Gradients of a device come on another thread, which the MPI library does not allow to call it.
    Use an MPI library with `MPI_THREAD_MULTIPLE`.
devices-not-probed
    `cuda_buffers="direct"` was set without a trial of MPI on device memory.
    Call `dearmpi.probe_devices()` before `dearmpi.connect()`, or use `cuda_buffers="staged"`.
ranks-differ-in-devices
    Some ranks train on a device and some on the host.
    Train on devices on every rank, or on none.
setting-without-effect
    A setting cannot have an effect on this model, device or world.
    Leave the setting out, or change the model as the message says.
optimizer-closed
    A method was called after `close()`.
    Make a new `DistributedOptimizer`.
plan-of-compiled-model
    `plan="auto"` was set for a compiled model, whose layers cannot be timed.
    Leave the plan out, or give one that was made without compilation.
parameters-share-memory
    Two tensors of the model, or the model and another process, share memory.
    Make them one `Parameter`, clone one of them, or use `gather="gradients"`.
ranks-built-differently
    Ranks built other models, optimizers or settings.
    Build and load the same on every rank; the message names the first difference.
tensor-not-served
    A parameter or gradient is sparse, or of another layout that a bucket cannot hold.
    Keep the tensor dense, or leave the parameter out of the optimizer.
tensor-without-values
    A parameter or buffer is lazy or on the meta device, and has no values yet.
    Initialize it on every rank before the optimizer is made.
module-not-served
    A module of the model would compute something else on several ranks, or takes no hooks.
    Replace the module as the message says.
buffer-not-averaged
    `buffers="average"` was set, but a buffer has a type that cannot be added.
    Use `buffers="broadcast"` or `"keep"`.
ddp-not-served
    An argument, hook or method of DistributedDataParallel has no counterpart here.
    Leave it out, or use what the message names.
framework-missing
    A file of `dearmpi.integrations` was imported without its framework.
    Install the package that the message names.
wrapped-model
    The model is inside a wrapper that averages or shards its gradients itself.
    Pass the model without the wrapper.
parameter-sharded
    A parameter is a part of a tensor that a sharding wrapper has divided over ranks.
    Leave the wrapper out, and pass the module as it was before.
wrapped-optimizer
    The optimizer is a wrapper that shards or averages by itself.
    Pass the optimizer that the wrapper was made with.
optimizer-needs-whole-tensors
    The optimizer does not treat each element by itself, or keeps state that cannot be sharded.
    Use `shards="whole"`, or `gather="gradients"`.
optimizer-couples-tensors
    The optimizer reads other parameters than the one that it updates, so that no rank can own some.
    Use `gather="gradients"`, or an optimizer that treats each tensor by itself.
trial-step-failed
    A trial step of the optimizer failed on the tensors that it would get.
    Use the setting that the message names, such as `shards="whole"` or `master_weights=True`.
optimizer-moves-parameters
    A step of the optimizer gives parameters other memory.
    Change values in place, as by `p.data.copy_(values)`.
optimizer-changes-nothing
    A trial step of the optimizer changed no parameter.
    Pass the optimizer that does the work, and let the outer one step the `DistributedOptimizer`.
optimizer-couples-buckets
    A step of the optimizer depends on all parameters together, but buckets are updated singly.
    Use an optimizer that keeps its values in each parameter's state, or train on one rank.
optimizer-not-linear
    A sparse gradient is to be sent, and steps of the optimizer are not linear in the gradient.
    Take `error_feedback="ef21"`, `compress="int8"` or `"int4"`, or `torch.optim.SGD`.
optimizer-keeps-gradient
    The optimizer keeps `p.grad` itself for a later step.
    Keep a clone of the gradient.
parameters-read-too-early
    Parameters were read between backward and the end of `step()`.
    Read them after `step()`, or make the optimizer with `eager=False`.
step-interrupted
    A `step()` was interrupted and cannot be finished.
    Let signal handlers set a flag only, and resume from a checkpoint.
step-missing
    Something was called that needs a finished step.
    Call `step()` first.
eager-forbids
    `eager=True` updates buckets during backward, and this use needs gradients or options after it.
    Make the optimizer with `eager=False`.
no-sync-misplaced
    A backward inside `no_sync()` follows one that reduces gradients, before a step.
    Put `no_sync()` around all backwards of a step but the last.
frozen-between-backwards
    A parameter was frozen or unfrozen between two backwards of one step.
    Freeze and unfreeze parameters between `step()` and the next backward.
gradient-replaced
    A gradient was cleared or replaced while it was being reduced.
    Use `optimizer.zero_grad()` to drop gradients.
gradient-taken-by-hook
    A hook of the script removed a gradient before it was reduced.
    Remove the hook, and let `optimizer.step()` update the parameter.
params-moved
    A parameter has moved to other memory since the `DistributedOptimizer` was made.
    Copy values into the parameter, or move the model before the optimizer is made.
gradient-used-up
    A gradient was read after `step()` or `zero_grad()` had used it.
    Read `param.grad` again between backward and `step()`.
gradient-not-averaged
    A backward inside `no_sync()` left a gradient that is not averaged yet.
    Call `optimizer.clip_grad_norm_()`, which averages it first.
gradient-missing-on-some-ranks
    A gradient is None on some ranks, where torch's functions leave it out.
    Call `optimizer.clip_grad_norm_()`, which includes what any rank has.
local-steps-forbid
    A closure, a scaler, `join()` or new parameters were used with local steps.
    Leave it out, as the message says; every rank must take equal numbers of steps.
optimizer-dropped
    A backward ran after the last reference to its `DistributedOptimizer` had gone.
    Keep a reference, or call `close()` first.
optimizer-copied
    A `DistributedOptimizer` was copied or pickled.
    Save its `state_dict()`.
optimizer-changed
    A method or attribute of the wrapped optimizer was set where it has no effect.
    Set it before the `DistributedOptimizer` is made, or override it as the message says.
param-groups-changed
    Param groups were changed other than by `add_param_group()` or `load_state_dict()`.
    Use these two methods of the `DistributedOptimizer`, or close it and make another.
saved-without-state
    The wrapped optimizer's `state_dict()` or `state` was read, which a `DistributedOptimizer` has.
    Read that of the `DistributedOptimizer` on every rank.
state-changed-in-place
    A tensor of `optimizer.state` was changed, but it is a gathered copy.
    Change what `state_dict()` returns, and give it to `load_state_dict()`.
nothing-to-train
    No parameter of the optimizer requires a gradient.
    Unfreeze parameters before the optimizer is made.
parameters-not-in-model
    The optimizer has parameters that the model does not have.
    Pass the model that the optimizer was made for; several go into one `nn.ModuleList`.
dtype-not-served
    A parameter has a type that cannot be added up or sent as the settings ask.
    Keep the parameter in another type, or change the setting that the message names.
parameter-taken
    A parameter belongs to another `DistributedOptimizer` that is not closed.
    Call `close()` on the other one, or give each its own parameters.
mode-not-served
    An optimizer's `train()` or `eval()` changes values that the settings keep elsewhere.
    Leave the settings out that the message names.
rank-cannot-plan
    A rank could not make its part of a plan.
    Read the message of that rank, or leave out `plan="auto"`.
plan-contradicts-settings
    A setting differs from what the plan decides.
    Leave the setting or the plan out, or make a plan with the setting.
plan-of-other-model
    The plan was made for other parameters or another world size.
    Make a plan for this model and this number of ranks.
file-missing
    A file or folder that was named does not exist.
    Check the path on every host.
ranks-differ-in-plan
    Ranks were given different plans.
    Give every rank the same plan.
ranks-differ-in-topology
    Ranks have read different topology files, or only some have one.
    Give every rank the same file.
state-of-other-model
    A loaded state has other shapes than the model or its optimizer.
    Load the state of this model and this optimizer.
ranks-call-layers-differently
    Ranks are in different SyncBatchNorm layers, or in one with different inputs.
    Call the same layers in the same order on every rank, on inputs of one type.
# plan
file-of-other-kind
    A file holds a plan, a profile or a calibration where another of them is needed.
    Give the file that the message names.
malformed-file
    A file is not of its format: a field is missing, unknown or of another type.
    Correct the field that the message names, or make the file anew.
malformed-value
    A text is not written in the form that its setting needs.
    Write the value as the message shows.
other-format-version
    A file was written in a format version that this dearmpi does not read.
    Make the file anew, or use the dearmpi version that wrote it.
unreadable-file
    A file or folder cannot be read, listed or looked at.
    Make it and the folders above it readable for this user, on every host.
plan-inconsistent
    The buckets, the schedule or the parameters of a plan contradict each other.
    Make the plan anew with `dear-train plan`, instead of editing its file.
profile-inconsistent
    A profile or workload names a layer or parameter twice, or lacks one.
    Profile the model anew with `dear-train profile`.
costs-of-other-world
    Costs were measured at another number of ranks than the plan is for.
    Measure at that number of ranks, or convert the costs with `costs.at()`.
samples-misfit
    Measured times are too few or too extreme to fit latency and bandwidth.
    Measure messages of two sizes or more.
nothing-to-simulate
    No time is known, or all times are zero, so there is nothing to compare.
    Give times above zero, or a measured profile.
# train
unforeseen-failure
    A rank failed with an exception that dearmpi does not raise itself.
    Read the traceback in that rank's log; the cause is often in the task's own code.
unknown-setting
    A setting in a file, the environment or a task's defaults does not exist.
    Correct its name; the message lists similar names.
given-twice
    A value is given twice in one place, or in two places that mean the same.
    Give it once.
resumed-setting-changed
    A setting that a resumed run must keep differs from the checkpoint's.
    Leave the setting out, or start a new run.
task-invalid
    A task's factory, model, loss or data is not of the kind that the trainer needs.
    Return what the message names; see the guide on tasks.
task-code-failed
    The code of a task raised an error while it was imported or called.
    Correct the task at the file and line that the message names.
unknown-task-option
    A task does not have, or did not read, an option that was given.
    Correct the option's name, or leave it out.
task-option-missing
    A task needs an option that was not given.
    Give the option with `--task-option NAME=VALUE`.
task-not-picklable
    Data or functions of a task cannot be sent to the processes that load samples.
    Define them at the top of a file, or use `--workers 0`.
library-missing
    A library that a task or setting needs is not installed.
    Install it with the command in the message.
library-broken
    A library is installed but cannot be imported.
    Install a version that fits this Python and torch.
model-not-built
    A library could not build a model for the given sizes.
    Choose another model or other sizes.
optimizer-not-built
    An optimizer cannot be made from its options, or needs more than one dense gradient.
    Correct the options, or choose another optimizer.
metrics-invalid
    A task's metrics are not numbers, change their names, or cannot name a column.
    Return the same names with one number each, for every batch.
metrics-out-of-order
    A row of metrics came for an earlier step or with an unannounced column.
    Append rows in the order of steps, and name all columns at the start.
data-insufficient
    There are fewer samples, classes or bytes of text than training needs.
    Give more data, or use fewer ranks.
data-misplaced
    Folders of a data set are not named or arranged as the task expects.
    Arrange the folders as the message says.
sample-unreadable
    A sample cannot be read, or samples do not form a batch.
    Correct or replace the sample that the message names.
worker-ended
    A process that loads samples did not start, or ended by itself.
    Use fewer `--workers`; look for a lack of memory or of `/dev/shm`.
batch-too-small
    A batch has fewer samples than ranks times micro-batches.
    Use a larger `--batch-size`, fewer ranks or fewer micro-batches.
batches-uneven
    The last batch of an epoch gives ranks different numbers of micro-batches.
    Choose a `--batch-size` that divides the samples, or fewer ranks.
not-finite
    A loss, gradient or parameter became NaN or infinite.
    Lower `--lr`, use `--max-grad-norm`, or skip such steps with `--on-nan skip`.
checkpoint-damaged
    A file of a checkpoint is missing, shortened, changed, or not of its format.
    Resume from another checkpoint, or restore this one from a copy.
checkpoint-of-other-model
    A checkpoint holds another model or optimizer than the one that was built.
    Train with the task and options that wrote it, or start a new run.
checkpoint-of-other-data
    A checkpoint was written by a run with other training data.
    Give the same data, or start a new run.
no-checkpoint
    There is no complete checkpoint to resume from.
    Name another run or checkpoint, or start a new run.
value-not-storable
    A value or tensor is of a type that a checkpoint cannot hold.
    Use plain values and dense tensors, or leave it out of the state.
random-state-misfit
    The random state in a checkpoint does not fit the installed torch or numpy.
    Resume with the versions that wrote the checkpoint.
cannot-write
    A file or folder cannot be written or removed.
    Choose a folder that this user may write to; look for a full disk.
disk-full
    The disk is full, or the user's quota is used up.
    Free space or keep fewer checkpoints, and resume.
file-exists
    The file to be written exists already.
    Name another file, or give `--overwrite`.
no-run
    A folder does not hold a run.
    Name the folder of a run, such as `runs/NAME`.
run-folder-in-use
    Another job or group trains in the run folder, or did so until now.
    Wait for its end and start again, or use another `--name` or folder.
run-folder-lost
    The run folder was removed, renamed or taken over while the job trained.
    Leave the folder to the other job, or start again.
run-folder-not-empty
    A new run would begin in a folder that holds a run or other files.
    Use another `--name`, or continue the run with `--resume auto`.
run-folder-not-shared
    Hosts see different folders under the path of the run folder.
    Give a `--run-folder` on a file system that all hosts share.
resume-unclear
    It is unclear which run to resume from the given checkpoint and name.
    Give or leave out `--name` and `--run-folder` as the message says.
working-folder-changed
    A task changed the working folder, so a relative run folder would move.
    Keep the working folder, or give an absolute `--run-folder`.
untraceable-iterations
    The iterations to trace are not taken, or buckets change among them.
    Trace the iterations that the message names.
no-usable-device
    A CUDA device was requested, but no rank can use one.
    Follow the cause in the message, or use `--device cpu`.
precision-unsupported
    The device cannot compute in the precision of the run.
    Choose another precision or device.
length-unknown
    The training data is a stream, and a setting needs its length.
    Give the steps that the message names.
main-thread-only
    Signals can be handled in the main thread only.
    Enter `StopRequest` in the main thread.
# bench, report, doctor, tune and the command line
no-traces
    The run folder holds no trace, or its traces hold nothing yet.
    Record some with dear-train run --trace START:STOP.
not-a-trace
    A file among the traces was not written by dear-train run --trace.
    Remove the file from the trace folder, or record the traces again.
output-is-input
    A command would overwrite a file that it reads.
    Name another file to write.
traces-of-two-runs
    The trace folder holds traces of two runs.
    Remove the traces of the other run.
one-rank-only
    A measurement of communication was started with one rank, which has none.
    Start several ranks with `mpirun`.
setting-missing
    A value was given without another that belongs to it, or none was given.
    Give the values that the message names together.
address-not-reached
    Ranks cannot reach rank 0 over TCP at the address by which its host knows itself.
    Correct the host names, or export the address as the message says.
unknown-method
    `dear-train bench` knows no method of that name.
    Choose one of the names in the message, or give your own with `--method`.
unknown-method-option
    A method of `dear-train bench` has no such option.
    Use one of the options that the message lists.
method-misfit
    A method cannot send in the format that was chosen.
    Leave the method out, or give the format to the other methods one by one.
unknown-sbatch-option
    An option was passed on that `sbatch` does not have under that name.
    Give its long name, without dashes.
unknown-command
    The command has no such part or option, or lacks one.
    Call it with `--help`.
measurement-flawed
    Measured times contradict each other or are no numbers above zero.
    Measure again on a quiet machine.
measurement-too-short
    Too few iterations were seen to decide anything.
    Measure more iterations.
command-not-started
    The command to run could not be started.
    Check its path and its permissions.
job-not-submitted
    `sbatch` is missing here or refused the job.
    Read the reason in the message; submit from a login node of the cluster.
plan-not-found
    The process that searches for a plan ended with an error.
    Read the reason in the message, or leave out `plan="auto"`.
"""


def _parse(table: str) -> dict[str, ErrorCode]:
    """By code; asserts that none stands twice."""
    lines = [line.strip() for line in table.splitlines() if not line.startswith("#")]
    codes = lines[::3]
    assert len(set(codes)) == len(codes), "a code stands twice"
    return dict(zip(codes, map(ErrorCode, lines[1::3], lines[2::3]), strict=True))


CODES = _parse(_TABLE)
