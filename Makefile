.PHONY: reproduce case-study test check

reproduce:
	python3 tasks.py reproduce

case-study:
	python3 tasks.py case-study

test:
	python3 tasks.py test

check:
	python3 tasks.py check
