# Muster: each target is a line or two. `make run` and `make test` need nothing but Debian and Rust.

PACKAGES_IMAGE = build-essential qemu-utils e2fsprogs fdisk mtools syslinux cpio xz-utils
PACKAGES_BUILD = libsqlite3-dev pkg-config
PACKAGES_RUN   = $(PACKAGES_BUILD) iproute2 nftables dnsmasq-base iputils-ping passt qemu-system-x86 ovmf qemu-system-modules-spice? $(PACKAGES_IMAGE)
PACKAGES_TEST  = $(PACKAGES_RUN) mariadb-server python3-venv busybox/busybox tcpdump procps xorriso openssl curl jq faketime galera-4 rsync lsof chromium zsh fish
AGENT_TARGET   = x86_64-unknown-linux-gnu
PACKAGES_TEST += python3-yaml
PROFILE       ?= dist
DATA_DIR      ?=
LISTEN        ?=

.PHONY: build quick agent deb deb-agent image run demo test test-faults test-upgrade test-packages check bench bench-scale fuzz packages-run packages-test packages-image packages-nspawn site
.DEFAULT_GOAL := build

build: packages-run           ## target/release/muster
	cargo build --release --locked -p muster

quick: packages-run           ## target/quick/muster, not optimized: builds in half the time
	cargo build --profile quick --locked -p muster

agent: packages-image         ## target/agent/muster-agent, the guest agent, statically linked
	RUSTFLAGS="-C target-feature=+crt-static" CARGO_TARGET_DIR=target/agent-build cargo build --locked --profile agent --target $(AGENT_TARGET) -p muster-agent
	install -CD target/agent-build/$(AGENT_TARGET)/agent/muster-agent target/agent/muster-agent

deb: packages-run image       ## target/deb/muster_VERSION_amd64.deb and the package of the agent, built with PROFILE
	cargo build --profile $(patsubst debug,dev,$(PROFILE)) --locked -p muster
	@PROFILE=$(PROFILE) ./packaging/muster/build-deb
	@./packaging/agent/build-deb

deb-agent: agent              ## target/deb/muster-agent_VERSION_amd64.deb, the agent as a Debian package
	@./packaging/agent/build-deb

image: agent                  ## target/image/tiny.qcow2, the small guest image
	@AGENT=$(CURDIR)/target/agent/muster-agent ./image/build

run: packages-run             ## a single-node cluster, in the foreground; the agent is built beside the program
	@$(MAKE) --no-print-directory -j2 quick image
	./target/quick/muster serve --image tiny=target/image/tiny.qcow2 $(if $(LISTEN),--listen $(LISTEN)) $(if $(DATA_DIR),--data-dir $(DATA_DIR))

demo: packages-run            ## the same with a network and a guest, and the console of the guest
	@$(MAKE) --no-print-directory -j2 quick image
	./target/quick/muster up --demo --image target/image/tiny.qcow2 $(if $(LISTEN),--listen $(LISTEN)) $(if $(DATA_DIR),--data-dir $(DATA_DIR))

test: packages-test image     ## every test; most of them wait for other processes, hence two per processor
	RUST_TEST_THREADS=$${RUST_TEST_THREADS:-$$(( $$(nproc) * 2 ))} cargo test --locked --workspace --tests

test-faults: packages-test image  ## 200 rounds of faults; MUSTER_FAULT_SEED repeats a run
	MUSTER_FAULT_ROUNDS=$${MUSTER_FAULT_ROUNDS:-200} MUSTER_TEST_REQUIRE_ALL=1 cargo test --locked -p muster --test faults -- --nocapture

test-upgrade: packages-test image  ## a rolling upgrade of three hosts from the previous build, which it builds from the git history
	MUSTER_TEST_REQUIRE_ALL=1 cargo test --locked -p muster --test vm -- --ignored --nocapture upgrade::

test-packages: packages-nspawn image  ## installs, upgrades, removes and purges the packages in a Debian root with systemd
	@./packaging/test-packages

check: packages-run           ## formatting and lints
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings

site: packages-run            ## target/site, the documentation as a web site
	cargo run --locked -p muster -- docs --output target/site

bench: packages-test image    ## speed and memory, as one table
	cargo build --release --locked -p muster -p muster-bench
	./target/release/muster-bench

bench-scale: packages-test    ## ten daemons with 10, 100 and 1000 simulated nodes on one MariaDB, as a table and docs/images/scale.svg
	cargo build --release --locked -p muster -p muster-bench
	./target/release/muster-bench --scale --plot docs/images/scale.svg

fuzz:                         ## two minutes on each fuzz target; needs a nightly toolchain and cargo-fuzz
	cd fuzz && for target in body frames identity token; do cargo +nightly fuzz run $$target -- -max_total_time=120 || exit 1; done

packages-nspawn: packages-run
	@./packaging/install-packages debootstrap systemd-container

packages-run packages-test packages-image:
	@./packaging/install-packages $(if $(filter %-test,$@),$(PACKAGES_TEST),$(if $(filter %-image,$@),$(PACKAGES_IMAGE),$(PACKAGES_RUN)))
	@$(if $(filter %-test,$@),./packaging/install-promtool && ./packaging/install-cloud-init-schema)
