//! The Debian packages: their fields, modes and scripts, the units, the manual pages, the completions and the container recipe.
//! `make test-packages` installs them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The Python of Debian, for which python3-yaml is installed.
const PYTHON: &str = "/usr/bin/python3";
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// Runs a command that must succeed, and returns its output and its errors.
fn run(command: &mut Command) -> (String, String) {
    let output = command.env("LC_ALL", "C.UTF-8").output().unwrap();
    let [stdout, stderr] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(output.status.success(), "{command:?}: {stdout}{stderr}");
    (stdout, stderr)
}

fn is_installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap();
    std::env::split_paths(&path).any(|directory| directory.join(program).exists())
}

/// Builds the package of `script` into a directory and returns its path.
fn build(directory: &Path, script: &str) -> Option<PathBuf> {
    let has_parts = ["target/agent/muster-agent", "target/image/tiny.qcow2"]
        .iter()
        .all(|part| Path::new(ROOT).join(part).exists());
    if !has_parts || !["dpkg-deb", "dpkg-shlibdeps", "strip"].into_iter().all(is_installed) {
        muster_testing::skipped("make image, dpkg-dev, binutils");
        return None;
    }
    let (text, _) = run(Command::new(format!("{ROOT}/packaging/{script}"))
        .env("PROGRAM", env!("CARGO_BIN_EXE_muster"))
        .env("OUT", directory)
        .env("COMPRESSION", "none"));
    Some(PathBuf::from(text.rsplit_once(": ").unwrap().0))
}

/// Returns the mode and the owner of each file of a package.
fn contents(package: &Path) -> BTreeMap<String, (String, String)> {
    let (text, _) = run(Command::new("dpkg-deb").arg("--contents").arg(package));
    let entry = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        (words[5].trim_start_matches('.').to_owned(), (words[0].to_owned(), words[1].to_owned()))
    };
    text.lines().map(entry).collect()
}

fn fields(package: &Path) -> BTreeMap<String, String> {
    let (text, _) = run(Command::new("dpkg-deb").arg("--field").arg(package));
    text.lines()
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

fn check_modes(contents: &BTreeMap<String, (String, String)>) {
    for (path, (mode, owner)) in contents {
        assert_eq!(owner, "root/root", "{path}");
        let expected = match path.as_str() {
            directory if directory.ends_with('/') => "drwxr-xr-x",
            "/etc/muster/muster.conf" => "-rw-r-----",
            program if program.contains("/bin/") || program == "/usr/lib/muster/muster-agent" => "-rwxr-xr-x",
            _ => "-rw-r--r--",
        };
        assert_eq!(mode, expected, "{path}");
    }
}

#[test]
fn package_has_fields_modes_units_manual_and_completions() {
    let directory = tempfile::tempdir().unwrap();
    let Some(package) = build(directory.path(), "muster/build-deb") else { return };
    let fields = fields(&package);
    assert_eq!((&*fields["Package"], &*fields["Version"]), ("muster", env!("CARGO_PKG_VERSION")));
    for name in ["libc6", "libsqlite3-0", "iproute2", "nftables", "dnsmasq-base"] {
        assert!(fields["Depends"].contains(name), "{fields:?}");
    }
    let contents = contents(&package);
    check_modes(&contents);

    let root = directory.path().join("root");
    run(Command::new("dpkg-deb").arg("--raw-extract").arg(&package).arg(&root));
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let is_conffile = |path: &&String| path.starts_with("/etc/") && !path.ends_with('/');
    let mut conffiles: Vec<String> = read("DEBIAN/conffiles").lines().map(str::to_owned).collect();
    conffiles.sort_unstable();
    assert_eq!(conffiles, contents.keys().filter(is_conffile).cloned().collect::<Vec<_>>());
    run(Command::new("md5sum").args(["--check", "--quiet", "DEBIAN/md5sums"]).current_dir(&root));
    for script in ["postinst", "prerm", "postrm"] {
        run(Command::new("sh").arg("-n").arg(root.join("DEBIAN").join(script)));
    }

    check_units(&root.join("lib/systemd/system"));
    check_manual(&root.join("usr/share/man/man1"));
    for (shell, file) in [
        ("bash", "bash-completion/completions/muster"),
        ("zsh", "zsh/vendor-completions/_muster"),
        ("fish", "fish/vendor_completions.d/muster.fish"),
    ] {
        let file = root.join("usr/share").join(file);
        assert!(std::fs::metadata(&file).unwrap().len() > 0);
        if is_installed(shell) {
            run(Command::new(shell).arg("-n").arg(file));
        }
    }
}

/// Checks the units, with another program, because ours is not installed here.
fn check_units(directory: &Path) {
    if !is_installed("systemd-analyze") {
        return;
    }
    let unit = directory.join("muster.service");
    let text = std::fs::read_to_string(&unit).unwrap();
    assert!(text.contains("ExecStart=/usr/bin/muster serve "));
    // Only newer versions of systemd know these.
    let is_known =
        |line: &&str| !line.starts_with("RestartSteps=") && !line.starts_with("RestartMaxDelaySec=");
    let lines: Vec<&str> = text.lines().filter(is_known).collect();
    let text = lines.join("\n").replace("ExecStart=/usr/bin/muster", "ExecStart=/bin/true");
    std::fs::write(&unit, text).unwrap();
    let (_, errors) = run(Command::new("systemd-analyze")
        .args(["verify", "--man=no", "--recursive-errors=no"])
        .args(["muster.service", "muster-vms.service", "muster.slice"].map(|unit| directory.join(unit))));
    assert_eq!(errors, "");
}

/// Checks that there is a page for nested commands, and that groff accepts all pages.
fn check_manual(directory: &Path) {
    run(Command::new("gzip").arg("-dr").arg(directory));
    let pages: Vec<PathBuf> =
        std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    let page = |name: &str| std::fs::read_to_string(directory.join(name)).unwrap();
    assert!(page("muster-instance-create.1").contains("\\-\\-memory"), "options");
    assert!(page("muster-node-drain.1").contains("Examples:"));
    assert!(page("muster.1").contains("muster\\-instance(1)"), "{}", page("muster.1"));
    assert!(!directory.join("muster-rootless.1").exists(), "hidden commands");
    if is_installed("groff") {
        let (_, warnings) = run(Command::new("groff")
            .args(["-man", "-Kutf8", "-Tutf8", "-ww", "-Wbreak", "-z"])
            .args(&pages));
        assert_eq!(warnings, "");
    }
}

#[test]
fn package_of_the_agent_has_fields_and_modes() {
    let directory = tempfile::tempdir().unwrap();
    let Some(package) = build(directory.path(), "agent/build-deb") else { return };
    assert_eq!(fields(&package)["Package"], "muster-agent");
    let contents = contents(&package);
    check_modes(&contents);
    assert!(contents.contains_key("/usr/bin/muster-agent"));
}

/// Returns the settings that a file of the container recipe sets, with plain values in place of variables.
fn container_settings(file: &str) -> BTreeMap<String, String> {
    let text = std::fs::read_to_string(format!("{ROOT}/packaging/container/{file}")).unwrap();
    let words = text.lines().flat_map(|line| match line.strip_prefix("ENV ") {
        Some(line) => line.split(' ').filter_map(|word| word.split_once('=')).collect(),
        None => Vec::from_iter(line.trim().split_once(": ")),
    });
    words
        .filter(|(name, _)| name.starts_with("MUSTER_"))
        .map(|(name, value)| {
            let value = value.trim_matches('"').replace("${DATABASE_PASSWORD:?}", "password");
            let value = if value.starts_with("${") { "a secret of the operator".to_owned() } else { value };
            (name.to_owned(), value)
        })
        .collect()
}

#[test]
fn container_recipe_uses_known_settings() {
    for (file, count) in [("Containerfile", 3), ("compose.yaml", 6)] {
        let settings = container_settings(file);
        assert_eq!(settings.len(), count, "{settings:?}");
        let (shown, warnings) =
            run(Command::new(env!("CARGO_BIN_EXE_muster")).arg("config").env_clear().envs(&settings));
        assert_eq!(warnings, "", "{file}");
        for name in settings.keys() {
            let name = name.trim_start_matches("MUSTER_");
            assert!(
                shown.lines().any(|line| line.starts_with(name) && line.contains("# environment")),
                "{name}: {shown}"
            );
        }
    }
}

#[test]
fn compose_file_has_three_nodes_and_a_database() {
    if !is_installed("python3")
        || !Command::new("python3").args(["-c", "import yaml"]).status().unwrap().success()
    {
        return muster_testing::skipped("python3-yaml");
    }
    let script = "import json, sys, yaml; print(json.dumps(yaml.safe_load(open(sys.argv[1]))))";
    let file = format!("{ROOT}/packaging/container/compose.yaml");
    let (text, _) = run(Command::new(PYTHON).args(["-c", script, &file]));
    let compose: serde_json::Value = serde_json::from_str(&text).unwrap();
    let services = compose["services"].as_object().unwrap();
    assert_eq!(services.keys().collect::<Vec<_>>(), ["database", "one", "three", "two"]);
    for name in ["one", "two", "three"] {
        let node = &services[name];
        assert_eq!(node["image"], "muster");
        assert_eq!(node["environment"]["MUSTER_NODE_NAME"], name);
        assert!(node["environment"]["MUSTER_DATABASE_URL"].as_str().unwrap().contains("@database:3306/"));
        let volume = node["volumes"][0].as_str().unwrap();
        assert!(compose["volumes"].as_object().unwrap().contains_key(volume.split(':').next().unwrap()));
    }
}
