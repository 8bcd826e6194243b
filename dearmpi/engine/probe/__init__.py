"""What an unknown optimizer can do, found out by trial steps on made-up values. Begin with `probe`.
May import update.
"""
