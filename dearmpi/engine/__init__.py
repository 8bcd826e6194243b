"""Where plan, communication and torch meet.

Who has whom, and what for:

    DistributedOptimizer     what a script sees, before the optimizer that it wraps
      Attachment             keeps an assembly in use, and builds the next one where buckets change
        Assembly             what belongs together as long as the buckets stay the same
          Blueprint          what it was built by: names, layout, schedule, settings
          Engine             the moments of an iteration, as the main thread sees them
            EngineState      what all parts share: buckets, channels, and the Iteration under way
            Backprop         how gradients get into the buckets, on the main thread
            Waiting          where the main thread waits, and for what
            Pipeline         the stages of each bucket, on the progress thread
              BucketRuntime  each bucket: flat buffers, state, and a GradTracker
              Codec          what travels for a bucket in one direction
          ShardUpdate        the wrapped optimizer on this rank's part of a bucket, one for each;
                             with ``gather="gradients"`` a WholeUpdate
          ModelHooks         torch's events, for Backprop and Waiting
          SideStream         where the driving thread computes, on a device beside the main thread
      Course                 by which plan or bucket cap the Attachment is laid out
        SelfPlanning         the way to a plan of the job's own
      BufferExchange         the model's own buffers, such as running means, where all are to agree
      Spans                  what takes how long, for whoever listens

``NullEngine`` takes the engine's place in a world of one that needs no buckets, and after
``close()``.

From a gradient's hook to the next forward, in this order: iteration/hooks, iteration/backprop,
bucket/bucket, bucket/grad_tracker, bucket/buffers, iteration/iteration, iteration/pipeline,
iteration/stages, codec/codec; then update/shard_update and update/update; then iteration/waiting.
Each room's first page says what is in it and where to begin.
"""
