"""What a rank sets up for itself and agrees upon with the others: device, threads, seeds, stop
requests, and failures. Begin with `agreement`. May import settings.
"""
