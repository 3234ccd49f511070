"""What is to be done: tasks, and the frozen train / validation / test starts they begin from."""
