"""What a recorded iteration means: exposed communication, figures, and the planner's view of it.
Begin with `figures`. May import read.
"""
