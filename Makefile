.PHONY: reproduce case-study benchmark test check

reproduce:
	python3 tasks.py reproduce

case-study:
	python3 tasks.py case-study

benchmark:
	python3 tasks.py benchmark

test:
	python3 tasks.py test

check:
	python3 tasks.py check
