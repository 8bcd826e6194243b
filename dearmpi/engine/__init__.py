"""Where plan, communication and torch meet.

What holds what:

    DistributedOptimizer       what a script uses in place of the optimizer that it wraps
      PlanController           the plan or bucket cap by which the LiveEngine is laid out
        SelfPlanning           plans while the job trains, for ``plan="auto"``, by a JobMeasurement
        LiveEngine             the built engine in use; another replaces it where buckets change,
                               and a Migration carries the state over
          BufferExchange       the model's own buffers, such as running means
          BuiltEngine          what belongs together as long as the buckets stay the same
            EngineSpec         what it was built by: names, layout, schedule, settings, and the
                               TrainingContext, which stays the same: optimizer, model, world
            Engine             the moments of an iteration, as the main thread sees them
              EngineState      what all parts share: buckets, channels, the Iteration under way
              Backprop         how gradients get into the buckets, on the main thread
              Waiting          where the main thread waits, and for what
              Pipeline         the stages of each bucket, on the progress thread
                BucketRuntime  each bucket: flat buffers, state, and a GradTracker
                Codec          what travels for a bucket in one direction
            OptimizerState     the wrapped optimizer's state, which the UpdateSet holds
              ShardUpdate      the optimizer on this rank's part of a bucket, one for each; with
                               ``gather="gradients"`` a WholeUpdate
              CommStream       where the progress thread computes, on a device beside the main
                               thread
            ModelHooks         torch's events, for the engine
      Spans                    what takes how long, for a recorder and torch's profiler

``NullEngine`` takes the engine's place in a world of one that needs no buckets, and after
``close()``.

From a gradient's hook to the next forward, in this order: iteration/hooks, iteration/backprop,
bucket/bucket, bucket/grad_tracker, bucket/buffers, iteration/pipeline, iteration/stages,
codec/codec, update/shard_update. ``Waiting``, in iteration/pipeline, holds the next forward until
they are over. docs/explanation/architecture.md lists the files of comm between them.

Each room's ``__init__`` says what the room is for and where to begin. At the top stands what a
script sees (optimizer, readings, facade, scaling), and the errors of wrong use (usage_errors).
"""
