"""The expensive physical truth: robosuite scenes stepped by MuJoCo, cameras, workers, and scripted experts."""
