"""Several processes of one run: `group` is what they tell each other, `sharing` who has what of the model, `parts` the
checkpoints that they write together, and `jobs` a job that is started again."""
