# Muster: each target is a line or two. `make run` and `make test` need nothing but Debian and Rust.

PACKAGES_RUN   = build-essential iproute2 nftables dnsmasq-base iputils-ping
PACKAGES_TEST  = $(PACKAGES_RUN) mariadb-server python3-venv busybox tcpdump procps
DATA_DIR      ?=
LISTEN        ?=

.PHONY: build run test check bench fuzz packages-run packages-test
.DEFAULT_GOAL := build

build: packages-run           ## target/release/muster
	cargo build --release --locked -p muster

run: build                    ## a cluster of one, in the foreground
	./target/release/muster serve $(if $(LISTEN),--listen $(LISTEN)) $(if $(DATA_DIR),--data-dir $(DATA_DIR))

test: packages-test           ## every test
	cargo build --locked -p muster
	cargo test --locked --workspace

check:                        ## formatting and lints
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings

bench: packages-test          ## speed and memory, as one table
	cargo build --release --locked -p muster -p muster-bench
	./target/release/muster-bench

fuzz:                         ## two minutes on each fuzz target; needs a nightly toolchain and cargo-fuzz
	cd fuzz && for target in body token; do cargo +nightly fuzz run $$target -- -max_total_time=120 || exit 1; done

packages-run packages-test:
	@./packaging/install-packages $(if $(filter %-test,$@),$(PACKAGES_TEST),$(PACKAGES_RUN))
