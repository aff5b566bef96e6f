"""dgr-bench: certificates and benchmarks of dgr, made with its public names only."""

# General layout. A command is a module with `register` and `run`; what it measures, computes and draws lies beside it.
#
#   cli, options    the commands, and the flags they share
#   certify         the long-context certificate of: profiles (what is locked), subjects (who runs a prompt), measures and
#                   resident (raw units), refusals (what must fail), checks (verdicts), metrics, certificate (the report),
#                   mutants (what each check must catch)
#   verify, compare what can be done with a result afterwards        describe   profiles and the schema, printed
#   real            the certificate of the real model
#   drill           lost, cut, stalled and slow stages: disturbances (one case), ring (delays), drill_report
#   frontier        speed over context: frontier_figures, frontier_report
#   overhead        dgr against upstream's llama-bench: upstream (its binary and its JSON), spreads (medians, goals)
#   hops            the cost of a hop: echo (its far side)
#   results         the schema of a result, and the journal that an interrupted run resumes from
#   environment     what a result carries of its machine
#   reports, plots  Markdown; SVG and PNG
#   progress        the bar
