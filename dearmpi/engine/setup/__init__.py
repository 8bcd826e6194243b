"""From an optimizer, a model and settings to an engine in use, and to the next one where buckets
change. May import all other rooms. In the order in which they are used:

context: what an engine is for, which stays. checks: refuses what a script gives wrongly.
ownership: cuts buckets as the optimizer bears it. spec: all that is decided, before anything is
built. build: from a spec to an engine; begin here. live_engine: the engine in use, and how another
replaces it. plan_controller: which plan or bucket cap it follows. self_planning and codec_choice:
how a job finds its plan (``plan="auto"``), and what it sends (``compress="auto"``).
"""
