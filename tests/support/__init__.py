"""Code that tests share: the oracle and other judges, models, faults, random plans and costs."""
