# Muster: each target is a line or two. `make run` and `make test` need nothing but Debian and Rust.

PACKAGES_IMAGE = qemu-utils e2fsprogs fdisk mtools syslinux cpio xz-utils
PACKAGES_RUN   = build-essential iproute2 nftables dnsmasq-base iputils-ping qemu-system-x86 ovmf qemu-system-modules-spice? $(PACKAGES_IMAGE)
PACKAGES_TEST  = $(PACKAGES_RUN) mariadb-server python3-venv busybox tcpdump procps xorriso openssl
DATA_DIR      ?=
LISTEN        ?=

.PHONY: build image run test check bench fuzz packages-run packages-test packages-image
.DEFAULT_GOAL := build

build: packages-run           ## target/release/muster
	cargo build --release --locked -p muster

image: packages-image         ## target/image/tiny.qcow2, the small guest
	@./image/build

run: build image              ## a cluster of one, in the foreground
	./target/release/muster serve --image tiny=target/image/tiny.qcow2 $(if $(LISTEN),--listen $(LISTEN)) $(if $(DATA_DIR),--data-dir $(DATA_DIR))

test: packages-test image     ## every test
	cargo build --locked -p muster
	cargo test --locked --workspace

check:                        ## formatting and lints
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings

bench: packages-test image    ## speed and memory, as one table
	cargo build --release --locked -p muster -p muster-bench
	./target/release/muster-bench

fuzz:                         ## two minutes on each fuzz target; needs a nightly toolchain and cargo-fuzz
	cd fuzz && for target in body token; do cargo +nightly fuzz run $$target -- -max_total_time=120 || exit 1; done

packages-run packages-test packages-image:
	@./packaging/install-packages $(if $(filter %-test,$@),$(PACKAGES_TEST),$(if $(filter %-image,$@),$(PACKAGES_IMAGE),$(PACKAGES_RUN)))
