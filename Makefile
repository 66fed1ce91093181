# Everything is in dev.py, which needs no make: `make test` is `python3 dev.py test`.
PYTHON ?= python3

.PHONY: help setup build demo test test-gpu lint format bench example-cpp kernels wheel
help setup build demo test test-gpu lint format bench example-cpp kernels wheel:
	@$(PYTHON) dev.py $(if $(filter help,$@),--help,$@) $(ARGS)
