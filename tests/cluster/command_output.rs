//! The formats, exit codes, profiles and completion of the `muster` command line against a daemon.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;

use muster_testing::Daemon;
use serde_json::Value;

use crate::{TIMEOUT, setup};

/// A command line with the credentials of a daemon and an own home directory.
pub(crate) struct Shell<'a> {
    pub(crate) daemon: &'a Daemon,
    pub(crate) home: &'a Path,
}

impl Shell<'_> {
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_muster"));
        command.args(arguments).env("HOME", self.home).env("MUSTER_CREDENTIALS", self.credentials());
        for variable in
            ["XDG_CONFIG_HOME", "XDG_STATE_HOME", "MUSTER_API_URL", "MUSTER_KEY", "MUSTER_PROFILE"]
        {
            command.env_remove(variable);
        }
        command
    }

    fn credentials(&self) -> std::path::PathBuf {
        self.daemon.data.join("credentials.json")
    }

    pub(crate) fn run(&self, line: &str) -> Output {
        self.command(&line.split(' ').collect::<Vec<_>>()).output().unwrap()
    }

    /// Runs a command that must succeed and returns its standard output.
    pub(crate) fn ok(&self, line: &str) -> String {
        let output = self.run(line);
        assert!(output.status.success(), "{line}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn json(&self, line: &str) -> Value {
        serde_json::from_str(&self.ok(&format!("-o json {line}"))).unwrap()
    }

    /// Returns the exit code and the standard error of a command.
    pub(crate) fn fail(&self, line: &str) -> (i32, String) {
        let output = self.run(line);
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    }

    /// Starts a command that prints until it is killed.
    fn follow(&self, line: &str) -> Follower {
        let mut command = self.command(&line.split(' ').collect::<Vec<_>>());
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Follower { child, lines }
    }
}

/// A running command and its output.
struct Follower {
    child: Child,
    lines: Receiver<String>,
}

impl Follower {
    /// Returns the next line that satisfies a condition.
    fn wait_for(&self, condition: impl Fn(&str) -> bool) -> String {
        loop {
            let line = self.lines.recv_timeout(TIMEOUT).expect("the output ended");
            if condition(&line) {
                return line;
            }
        }
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a daemon whose simulated nodes have space for instances.
pub(crate) fn start(directory: &Path) -> Daemon {
    setup(directory).set("NODE_DISK_RESERVATION_GB", "0").start()
}

#[test]
fn lists_are_filtered_sorted_and_printed_in_every_format() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = start(directory.path());
    let shell = Shell { daemon: &daemon, home: directory.path() };
    for (name, netblock) in [("lan", "10.0.0.0/24"), ("web", "10.0.1.0/24"), ("wan", "10.0.2.0/24")] {
        shell.ok(&format!("network create {name} {netblock} -q"));
    }
    assert_eq!(shell.ok("network list -o name --filter name:w* --sort=-name"), "web\nwan\n");
    assert_eq!(shell.ok("network list -o name --sort name --limit 2"), "lan\nwan\n");
    let columns = shell.ok("network list --columns netblock,name,provide_dns --filter name:lan");
    assert_eq!(columns, "NETBLOCK     NAME  PROVIDE DNS\n10.0.0.0/24  lan   false\n");
    let (table, wide) = (shell.ok("network list"), shell.ok("network list -o wide"));
    assert!(!table.contains("VXID") && wide.contains("VXID"), "{table}{wide}");
    let yaml = shell.ok("network list --filter name:lan -o yaml");
    assert!(yaml.starts_with("- ") && yaml.contains("name: lan\n"), "{yaml}");
    assert_eq!(shell.json("network list --limit 1").as_array().unwrap().len(), 1);
    let (code, error) = shell.fail("network list --columns colour");
    assert!(code == 2 && error.contains("netblock"), "{code}: {error}");
    let (code, error) = shell.fail("network list --sort colour");
    assert!(code == 3 && error.contains("colour"), "{code}: {error}");
    let quiet = shell.run("network delete wan --quiet");
    assert!(quiet.status.success() && quiet.stderr.is_empty(), "{quiet:?}");
}

#[test]
fn exit_codes_tell_why_a_command_failed() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = start(directory.path());
    let shell = Shell { daemon: &daemon, home: directory.path() };
    shell.ok("network create lan 10.0.0.0/24");
    shell.ok("instance create web --disk 1 --network lan");
    for (line, code) in [
        ("instance explode", 2),
        ("network create x 10.0.0.0/99", 3),
        ("namespace show absent", 4),
        ("instance delete absent", 4),
        ("node delete sim-1 --yes", 5),
        ("network delete lan --timeout 1", 7),
        ("--api-url http://127.0.0.1:1 --namespace x --key y node list", 6),
        ("api GET /networks/absent", 4),
        ("api POST /networks --data {}", 3),
    ] {
        let (actual, error) = shell.fail(line);
        assert_eq!(actual, code, "{line}: {error}");
    }
    let (_, error) = shell.fail("instance show wbe");
    assert!(error.trim_end().ends_with("; did you mean web?") && error.lines().count() == 1, "{error}");
    let (_, error) = shell.fail("node show smi-2");
    assert!(error.contains("did you mean sim-"), "{error}");
    let (_, error) = shell.fail("instnace list");
    assert!(error.contains("instance"), "{error}");
    assert!(shell.ok("--help").contains("  7  The work was not completed in time"));
    shell.ok("instance delete web");
    // Waits for the deletion that the timeout has not ended.
    let (code, error) = shell.fail("network delete lan");
    assert!(code == 0 || code == 4, "{code}: {error}");
}

#[test]
fn dry_runs_create_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = start(directory.path());
    let shell = Shell { daemon: &daemon, home: directory.path() };
    assert_eq!(shell.json("network create lan 10.0.0.0/24 --dry-run")["name"], "lan");
    assert_eq!(shell.json("instance create web --disk 1 --dry-run")["name"], "web");
    let (code, error) = shell.fail("instance create big --memory 9999999 --disk 1 --dry-run");
    assert!(code == 3 || code == 6, "{code}: {error}");
    assert_eq!(shell.json("network list"), Value::Array(vec![]));
    assert_eq!(shell.json("instance list --all"), Value::Array(vec![]));
    assert_eq!(shell.json("namespace create ci --dry-run")["name"], "ci");
    let issuer = "issuer create forge --issuer-url https://forge.example --jwks-uri https://forge.example/keys --audience x";
    assert_eq!(shell.json(&format!("{issuer} --dry-run"))["name"], "forge");
    shell.ok(issuer);
    let claim = "claim create system --cpus 1 --memory 64 --disk 1 --expires 1h --dry-run";
    assert_eq!(shell.json(claim)["limit_cpus"], 1);
    let rule = "rule create system deploy --issuer forge --claim ref=a --scope node.read --ttl 60 --prefix ci --dry-run";
    assert_eq!(shell.json(rule)["name"], "deploy");
    assert_eq!(shell.json("webhook create system chat https://8.8.8.8/ --dry-run")["name"], "chat");
    assert_eq!(shell.ok("key add system robot --dry-run"), "", "no secret is printed");
    shell.ok("trust add system friend --dry-run");
    assert!(!shell.ok("trust list system").contains("friend"));
    for (command, expected) in [
        ("rule create system deploy --issuer forge --claim ref=a --scope x --ttl 0 --prefix ci --dry-run", 3),
        ("instance plug absent lan --dry-run", 4),
    ] {
        let (code, error) = shell.fail(command);
        assert_eq!(code, expected, "{command}: {error}");
    }
    for list in ["claim list system", "rule list system", "webhook list system"] {
        assert_eq!(shell.json(list), Value::Array(vec![]), "{list}");
    }
    assert!(!shell.ok("namespace list").contains("ci") && !shell.ok("key list system").contains("robot"));
}

#[test]
fn any_request_can_be_sent() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = start(directory.path());
    let shell = Shell { daemon: &daemon, home: directory.path() };
    let body = directory.path().join("body.json");
    fs::write(&body, r#"{"name": "lan", "netblock": "10.0.0.0/24"}"#).unwrap();
    let created = shell.json(&format!("api post networks --data @{}", body.display()));
    assert_eq!(created["name"], "lan");
    let listed = shell.json("api GET /networks --query filter=name:lan --query limit=5");
    assert_eq!(listed[0]["uuid"], created["uuid"]);
    let refused = shell.run("api GET /networks/absent");
    assert_eq!(serde_json::from_slice::<Value>(&refused.stdout).unwrap()["status"], 404);
    assert!(shell.ok("api GET /").contains("<html"), "a page is not JSON");
    assert_eq!(shell.json("whoami")["namespace"], "system");
    assert!(shell.ok("cluster resources").contains("sim-2"));
    assert!(shell.ok("cluster locks").starts_with("LEASE"));
    assert!(shell.ok("top --once").contains("sim-1"));
    assert_eq!(shell.json("key show system deploy")["key_name"], "deploy");
}

#[test]
fn changes_and_events_are_followed() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = start(directory.path());
    let shell = Shell { daemon: &daemon, home: directory.path() };
    shell.ok("instance create web --disk 1");
    let table = shell.follow("instance list --watch --columns name,power");
    assert_eq!(table.wait_for(|line| line.starts_with("web")), "web   on");
    let records = shell.follow("instance list -o json --watch");
    records.wait_for(|line| line.contains("\"change\":\"added\"") && line.contains("\"web\""));
    let own = shell.follow("events instance web --follow");
    own.wait_for(|line| line.contains("audit") || line.contains("status"));
    shell.ok("instance poweroff web");
    table.wait_for(|line| line == "web   off");
    records
        .wait_for(|line| line.contains("\"change\":\"changed\"") && line.contains("\"power_state\":\"off\""));
    shell.ok("instance create db --disk 1");
    records.wait_for(|line| line.contains("\"change\":\"added\"") && line.contains("\"db\""));
    let all = shell.follow("-o json events --follow");
    let first = thread::spawn(move || all.wait_for(|line| line.contains("\"object_type\":\"instance\"")));
    // The command prints nothing until something happens after it has started.
    while !first.is_finished() {
        shell.ok("instance set-metadata db owner ops");
    }
    let event: Value = serde_json::from_str(&first.join().unwrap()).unwrap();
    assert!(event["message"].is_string(), "{event}");
    shell.ok("instance delete web");
    records.wait_for(|line| line.contains("\"change\":\"deleted\"") && line.contains("\"web\""));
    shell.ok("instance delete db");
}

#[test]
fn profiles_select_the_cluster_and_keep_keys_to_their_url() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = start(directory.path());
    let shell = Shell { daemon: &daemon, home: directory.path() };
    let saved: Value = serde_json::from_str(&fs::read_to_string(shell.credentials()).unwrap()).unwrap();
    let (url, key) = (saved["apiurl"].as_str().unwrap(), saved["key"].as_str().unwrap());
    let run =
        |arguments: &[&str]| shell.command(arguments).env_remove("MUSTER_CREDENTIALS").output().unwrap();
    let add = ["--api-url", url, "--namespace", "system", "profile", "add", "work", "--key", key];
    assert!(run(&add).status.success());
    let wrong = ["--api-url", url, "--namespace", "system", "profile", "add", "bad", "--key", "wrong"];
    assert_eq!(run(&wrong).status.code(), Some(3), "a profile that cannot log in is not saved");
    assert!(run(&["--profile", "work", "node", "list"]).status.success());
    assert!(run(&["profile", "use", "work"]).status.success());
    let whoami = run(&["-o", "json", "whoami"]);
    assert_eq!(serde_json::from_slice::<Value>(&whoami.stdout).unwrap()["namespace"], "system");
    let listed = String::from_utf8(run(&["profile", "list", "-o", "json"]).stdout).unwrap();
    assert!(
        listed.contains("\"current\": true") && !listed.contains(key) && !listed.contains("bad"),
        "{listed}"
    );

    let other = run(&["--profile", "work", "--api-url", "http://127.0.0.1:1", "node", "list"]);
    let error = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(!other.status.success() && error.contains("were not sent"), "{error}");
    assert!(run(&["profile", "remove", "work"]).status.success());
    assert!(!run(&["--profile", "work", "node", "list"]).status.success());
    assert_eq!(String::from_utf8(run(&["profile", "list", "-o", "name"]).stdout).unwrap(), "");
}

/// Completes a command line in bash, which splits words at `:` and `=`, and returns the candidates.
fn complete_in_bash(shell: &Shell<'_>, line: &str) -> Vec<String> {
    let script = r#"
        source <("$PROGRAM" completion bash)
        COMP_LINE=$LINE COMP_WORDBREAKS=$' :='
        split=${LINE//=/ = }
        read -ra COMP_WORDS <<<"${split//:/ : }"
        [[ $LINE == *" " ]] && COMP_WORDS+=("")
        COMP_LINE=$PROGRAM${COMP_LINE#muster}
        COMP_WORDS[0]=$PROGRAM
        COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
        compopt() { COMPREPLY+=("files"); }
        _muster
        printf '%s\n' "${COMPREPLY[@]}"
    "#;
    let mut command = Command::new("bash");
    command.args(["-c", script]).env("PROGRAM", env!("CARGO_BIN_EXE_muster")).env("LINE", line);
    command.env("HOME", shell.home).env("MUSTER_CREDENTIALS", shell.credentials());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn bash_completes_commands_and_names_of_the_cluster() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = start(directory.path());
    let shell = Shell { daemon: &daemon, home: directory.path() };
    shell.ok("instance create web --disk 1");
    shell.ok("instance create worker --disk 1");
    assert_eq!(complete_in_bash(&shell, "muster inst"), ["instance"]);
    assert_eq!(complete_in_bash(&shell, "muster instance show we"), ["web"]);
    let mut names = complete_in_bash(&shell, "muster console ");
    names.sort();
    assert_eq!(names, ["web", "worker"]);
    assert_eq!(complete_in_bash(&shell, "muster node drain sim-2"), ["sim-2"]);
    assert_eq!(complete_in_bash(&shell, "muster key delete system dep"), ["deploy"]);
    assert_eq!(complete_in_bash(&shell, "muster instance list -o ya"), ["yaml"]);
    assert_eq!(complete_in_bash(&shell, "muster artifact upload tiny "), ["files"]);
    // Only the part behind the last `=` or `:` is replaced.
    assert_eq!(complete_in_bash(&shell, "muster instance list --format=ya"), ["yaml"]);
    assert_eq!(
        complete_in_bash(&shell, "muster instance list --format="),
        ["table", "wide", "json", "yaml", "name"]
    );
    assert_eq!(complete_in_bash(&shell, "muster instance create x --placed-on=sim-2 --network=l"), [""]);
    assert_eq!(complete_in_bash(&shell, "muster instance list --filter name:w --format ya"), ["yaml"]);
    shell.ok("namespace create a:b");
    assert_eq!(complete_in_bash(&shell, "muster namespace show a:"), ["b"]);
    complete_in_fish(&shell);
    shell.ok("instance delete-all --yes");
}

fn complete_in_fish(shell: &Shell<'_>) {
    if Command::new("fish").arg("--version").output().is_err() {
        return muster_testing::skipped("fish");
    }
    let complete = |line: &str| {
        let program = Path::new(env!("CARGO_BIN_EXE_muster")).parent().unwrap();
        let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
        let mut command = Command::new("fish");
        command.args(["--no-config", "-c", "muster completion fish | source; complete -C $LINE"]);
        command.env("LINE", line).env("PATH", path);
        command.env("HOME", shell.home).env("MUSTER_CREDENTIALS", shell.credentials());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        text.lines().map(|line| line.split('\t').next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(complete("muster instance show we"), ["web"]);
    assert_eq!(complete("muster instance list --format=ya"), ["--format=yaml"]);
    assert_eq!(complete("muster namespace show a:"), ["a:b"]);
}

#[test]
fn completion_scripts_are_valid_for_their_shells() {
    for shell in ["bash", "zsh", "fish"] {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("script");
        let output = Command::new(env!("CARGO_BIN_EXE_muster")).args(["completion", shell]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        fs::write(&file, output.stdout).unwrap();
        match Command::new(shell).arg("-n").arg(&file).output() {
            Ok(check) => assert!(check.status.success() && check.stderr.is_empty(), "{shell}: {check:?}"),
            Err(_) => muster_testing::skipped(&format!("{shell} (Debian package {shell})")),
        }
    }
}

#[test]
fn ssh_connects_to_the_address_of_the_instance() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = start(directory.path());
    let shell = Shell { daemon: &daemon, home: directory.path() };
    shell.ok("network create lan 10.0.0.0/24");
    shell.ok("instance create web --disk 1 --network lan@10.0.0.7");
    let line = shell.ok("ssh web --print --login debian -- uptime");
    assert!(
        line.starts_with("ssh ") && line.contains("'10.0.0.7' 'uptime'") && line.contains("'debian'"),
        "{line}"
    );
    shell.ok("instance create alone --disk 1");
    let (code, error) = shell.fail("ssh alone");
    assert!(code == 1 && error.contains("has no address"), "{error}");
    shell.ok("instance delete-all --yes");
}

#[test]
fn closed_pipes_do_not_panic() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().to_str().unwrap();
    let cases: [(&[&str], i32); 5] = [
        (&["config"], 0),
        (&["-o", "yaml", "config"], 0),
        (&["completion", "bash"], 0),
        (&["down", "--data-dir", data], 0),
        (&["--credentials", "/nonexistent", "node", "list"], 1),
    ];
    for (words, code) in cases {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_muster"));
        command.args(words).env_clear().stdout(writer.try_clone().unwrap()).stderr(writer);
        assert_eq!(command.status().unwrap().code(), Some(code), "{words:?}");
    }
}
