.PHONY: reproduce test check

reproduce:
	python3 tasks.py reproduce

test:
	python3 tasks.py test

check:
	python3 tasks.py check
