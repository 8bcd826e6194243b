"""Where plan, communication and torch meet.

What holds what:

    DistributedOptimizer     what a script uses in place of the optimizer that it wraps
      LiveEngine             the built engine in use; another replaces it where buckets change
        BuiltEngine          what belongs together as long as the buckets stay the same
          EngineSpec         what it was built by: names, layout, schedule, settings
          Engine             the moments of an iteration, as the main thread sees them
          ShardUpdate        the wrapped optimizer on this rank's part of a bucket, one for each;
                             with ``gather="gradients"`` a WholeUpdate
          ModelHooks         torch's events, for the engine
          CommStream         where the progress thread computes, on a device beside the main thread
      PlanController         the plan or bucket cap by which the LiveEngine is laid out
        SelfPlanning         measures and plans while the job trains, for ``plan="auto"``
      BufferExchange         the model's own buffers, such as running means
      Spans                  what takes how long, for a recorder and torch's profiler

``NullEngine`` takes the engine's place in a world of one that needs no buckets, ``ClosedEngine``
once it is closed.

Each room's ``__init__`` says what the room is for and where to begin. At the top stands what a
script sees (optimizer, facade, clipping, scaler), and the errors of wrong use (refusal).
"""
