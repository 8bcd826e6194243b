"""Where plan, communication and torch meet.

Who has whom, and what for:

    DistributedOptimizer     what a script sees, before the optimizer that it wraps
      Attachment             keeps an assembly in use, and builds the next one where buckets change
        Assembly             what belongs together as long as the buckets stay the same
          Blueprint          what it was built by: names, layout, schedule, settings
          Engine             the moments of an iteration, as the main thread sees them
            Backprop         gradients' way into the buckets, until these are launched
            Waiting          where the main thread waits, and for what
            Pipeline         what happens to launched buckets, on the driving thread
              BucketRuntime  each bucket: flat buffers, state, and which gradients have come
              Cycle          what is true of one iteration only
          ShardUpdate        the wrapped optimizer on this rank's part of a bucket, one for each;
                             with ``gather="gradients"`` a WholeUpdate
          ModelHooks         torch's events, for Backprop and Waiting
          SideStream         where the driving thread computes, on a device beside the main thread
      Course                 by which plan or bucket cap the Attachment is laid out
        SelfPlanning         the way to a plan of the job's own
      BufferExchange         the model's own buffers, such as running means, where all are to agree
      Spans                  what takes how long, for whoever listens

``NullEngine`` takes the engine's place in a world of one that needs no buckets, ``ClosedEngine``
once it is closed.

The modules:

What a script sees: optimizer, facade (the part of torch's that others hold on to), settings,
    gathered_state (as ``optimizer.state``), clipping, scaler, batch_norm (layer_call).
What is built: course, self_planning, attachment, design, blueprint, assembly, channels, claim,
    unserved (modules), wrappers (of torch's); handover and succession (from one assembly to the
    next).
An iteration: engine (alone, closed), backprop, waiting, pipeline, cycle, roll_call, late_buckets,
    join, wire_range; bucket, bucket_state, arrivals, buffers, gradient_memory, gradient (what
    stands in for one), reduced_gradients (what it asks).
Updates: update, shard_update, whole_update, updates (of all buckets), shard, master; options; and
    what the wrapped optimizer can do: counting, modes, probe, piecewise, trial, own_state.
The optimizer's state: custody (who has it), state (all of it), local_state (this rank's),
    relocation and parcel (on the way to other owners).
The model: hooks, compilation, aliasing, model_tensors (as ranks compare them), broadcast,
    model_buffers, layers.
Devices: device, device_way (how tensors get to MPI), side_stream, device_collectives, staging,
    direct, alone_collectives, passage, pinned, host_shard, memory (the host's).
What is told: span, spans, layer_spans, layer_ranges, clock; and of mistakes: refusal, check,
    replicas.
"""
