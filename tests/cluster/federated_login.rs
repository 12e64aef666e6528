//! How a job of a CI system comes in: its identity token becomes a key that expires, by the command line alone.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use muster_testing::{Daemon, Issuer};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{PATIENCE, setup};

const MUSTER: &str = env!("CARGO_BIN_EXE_muster");

/// A cluster that trusts an issuer, with a rule for one branch of one repository.
struct World {
    folder: TempDir,
    issuer: Issuer,
    daemon: Daemon,
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let issuer = Issuer::start();
        let authority = folder.path().join("authority.pem");
        issuer.write_ca(&authority);
        let daemon = setup(folder.path())
            .set("FEDERATION_JWKS_CA_BUNDLE", authority.to_str().unwrap())
            .set("FEDERATION_JWKS_ALLOWED_NETWORKS", "127.0.0.0/8,::1")
            .start();
        fs::create_dir(folder.path().join("job")).unwrap();
        let world = Self { folder, issuer, daemon };
        let (url, keys) = (world.issuer.url(), world.issuer.jwks_uri());
        world.administer("namespace create ci");
        world.administer(&format!(
            "issuer create forge --issuer-url {url} --jwks-uri {keys} --audience cloud"
        ));
        world.administer(
            "rule create ci deploy --issuer forge --claim repository=acme/widgets --claim ref=refs/heads/main \
             --scope network.* --ttl 600 --prefix robot",
        );
        world
    }

    /// Runs the command as the administrator, and answers what it printed.
    fn administer(&self, arguments: &str) -> String {
        let credentials = self.daemon.data.join("credentials.json");
        let outcome = self.run(arguments, &[("MUSTER_CREDENTIALS", credentials.to_str().unwrap())]);
        assert!(outcome.done, "{arguments}: {outcome:?}");
        outcome.out
    }

    /// Where the job's own login is remembered.
    fn login(&self) -> PathBuf {
        self.folder.path().join("job/.config/muster/credentials.json")
    }

    /// The file with a token that was made now, for a branch.
    fn token_file(&self, branch: &str) -> String {
        let file = self.folder.path().join("token");
        fs::write(&file, self.token(branch) + "\n").unwrap();
        file.display().to_string()
    }

    fn token(&self, branch: &str) -> String {
        let mut claims = self.issuer.claims("cloud");
        claims["repository"] = "acme/widgets".into();
        claims["ref"] = format!("refs/heads/{branch}").into();
        self.issuer.token(claims)
    }

    /// Runs the command as the job does.
    fn job(&self, arguments: &str, variables: &[(&str, &str)]) -> Outcome {
        let mut all = vec![("MUSTER_API_URL", self.daemon.url.as_str())];
        all.extend(variables);
        self.run(arguments, &all)
    }

    /// Runs the command with these variables and no others.
    fn run(&self, arguments: &str, variables: &[(&str, &str)]) -> Outcome {
        let mut command = Command::new(MUSTER);
        command.args(arguments.split_whitespace());
        Outcome::of(&mut command, &self.folder.path().join("job"), variables)
    }
}

#[derive(Debug)]
struct Outcome {
    done: bool,
    out: String,
    err: String,
}

impl Outcome {
    fn of(command: &mut Command, home: &Path, variables: &[(&str, &str)]) -> Self {
        let path = std::env::var_os("PATH").unwrap_or_default();
        command.env_clear().env("PATH", path).env("HOME", home).envs(variables.iter().copied());
        let output = command.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self { done: output.status.success(), out: text(&output.stdout), err: text(&output.stderr) }
    }
}

#[test]
fn a_token_in_a_file_becomes_a_login_that_its_rule_limits() {
    let world = World::new();
    let token = world.token_file("main");
    let login = format!("login --federated --namespace ci --rule deploy --token-file {token}");
    let outcome = world.job(&login, &[]);
    assert!(outcome.done && outcome.out.is_empty(), "{outcome:?}");
    assert!(outcome.err.contains("as namespace ci with key robot-"), "{outcome:?}");
    assert_eq!(fs::metadata(world.login()).unwrap().permissions().mode() & 0o777, 0o600);

    // The login alone says where, who and with what.
    let made = world.run("network create lan 10.0.0.0/24 --no-wait", &[]);
    assert!(made.done, "{made:?}");
    assert!(world.run("network list", &[]).out.contains("lan"));
    let refused = world.run("artifact list", &[]);
    assert!(!refused.done && refused.err.contains("not scoped"), "{refused:?}");

    let again = world.job(&login, &[]);
    assert!(!again.done && again.err.contains("token already used"), "{again:?}");
    assert!(world.run("network list", &[]).done, "what was remembered is still good");
}

#[test]
fn a_refused_token_changes_nothing_and_is_not_shown() {
    let world = World::new();
    let token = world.token_file("other");
    let login = format!("login --federated --namespace ci --rule deploy --token-file {token}");
    let outcome = world.job(&login, &[]);
    assert!(!outcome.done && outcome.out.is_empty(), "{outcome:?}");
    assert!(outcome.err.contains("federated exchange refused: claims do not match"), "{outcome:?}");
    assert!(!outcome.err.contains(fs::read_to_string(&token).unwrap().trim()), "{outcome:?}");
    assert!(!world.login().exists());
    // Its owner learns why. Events are on their way for a moment.
    let started = Instant::now();
    let told = loop {
        let told = world.administer("rule events ci deploy --type audit");
        if told.contains("federated exchange refused") {
            break told;
        }
        assert!(started.elapsed() < PATIENCE, "{told}");
        muster_testing::wait(Duration::from_millis(50));
    };
    assert!(told.contains("claims do not match") && told.contains("ref"), "{told}");

    let nothing = world.job("login --federated --namespace ci --rule deploy", &[("GITLAB_CI", "true")]);
    assert!(!nothing.done && nothing.err.contains("MUSTER_ID_TOKEN"), "{nothing:?}");
    let no_rule = world.job("login --federated --namespace ci", &[]);
    assert!(!no_rule.done && no_rule.err.contains("--rule"), "{no_rule:?}");
}

#[test]
fn a_job_of_github_asks_for_its_token_and_a_shell_takes_the_login() {
    let world = World::new();
    let (url, asked) = service(json!({ "count": 1, "value": world.token("main") }));
    let variables = [
        ("GITHUB_ACTIONS", "true"),
        ("ACTIONS_ID_TOKEN_REQUEST_URL", url.as_str()),
        ("ACTIONS_ID_TOKEN_REQUEST_TOKEN", "proof"),
        ("MUSTER_API_URL", world.daemon.url.as_str()),
        ("MUSTER_NAMESPACE", "ci"),
        ("MUSTER", MUSTER),
    ];
    let script = "eval \"$($MUSTER login --federated --rule deploy --audience cloud --print)\" && \
                  $MUSTER network create lan 10.0.0.0/24 --no-wait && $MUSTER network list";
    let home = world.folder.path().join("job");
    let outcome = Outcome::of(Command::new("sh").args(["-c", script]), &home, &variables);
    assert!(outcome.done && outcome.out.contains("lan"), "{outcome:?}");
    let head = asked.join().unwrap();
    assert!(head.starts_with("GET /token?api-version=2.0&audience=cloud "), "{head}");
    assert!(head.contains("authorization: Bearer proof\r\n"), "{head}");
    assert!(!world.login().exists(), "it was printed and not remembered");
}

/// A service that answers one request for a token, and the head of that request.
fn service(answer: Value) -> (String, JoinHandle<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/token?api-version=2.0", listener.local_addr().unwrap());
    let asked = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            socket.read_exact(&mut byte).unwrap();
            head.push(byte[0]);
        }
        let answer = answer.to_string();
        write!(socket, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{answer}", answer.len()).unwrap();
        String::from_utf8(head).unwrap()
    });
    (url, asked)
}
