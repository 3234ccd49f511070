"""The vision-language-action policy: encoder, chunk head, imitation, LeRobot in and out, robot entry points, evaluation."""
