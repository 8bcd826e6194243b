"""Local steps: ranks train by themselves and exchange now and then. Begin with `local_optimizer`.
May import engine and what is below it; the exchange itself is that of a `DistributedOptimizer`.
"""
