"""Train, evaluate and predict text classification: the GLUE tasks, or files of your own."""
