//! The command line sends a key only to the URL that the key was created for.

use std::io::ErrorKind;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

use serde_json::json;

/// Writes a credentials file for a URL.
fn save(file: &Path, url: &str) {
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(file, json!({ "namespace": "system", "key": "hunter2", "apiurl": url }).to_string())
        .unwrap();
}

#[test]
fn server_at_another_url_receives_no_key() {
    let own = TcpListener::bind("127.0.0.1:0").unwrap();
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    other.set_nonblocking(true).unwrap();
    let [own_url, other_url] =
        [&own, &other].map(|listener| format!("http://{}", listener.local_addr().unwrap()));
    let home = tempfile::tempdir().unwrap();
    let login = ".config/muster/credentials.json";
    let profile = home.path().join("profile.json");
    let (profile, other_url) = (profile.to_str().unwrap(), other_url.as_str());
    let variables = |list: &[(&'static str, &str)]| -> Vec<(&'static str, String)> {
        list.iter().map(|(name, value)| (*name, (*value).to_owned())).collect()
    };
    let own_key = [("MUSTER_KEY", "hunter2"), ("MUSTER_API_URL", own_url.as_str())];
    let cases = [
        (login, vec!["--api-url", other_url], vec![], login),
        (login, vec![], variables(&[("MUSTER_API_URL", other_url)]), login),
        (login, vec!["--namespace", "ci", "--api-url", other_url], vec![], login),
        (login, vec![], variables(&[("MUSTER_API_URL", other_url), ("MUSTER_NAMESPACE", "ci")]), login),
        ("profile.json", vec!["--credentials", profile, "--api-url", other_url], vec![], profile),
        (
            "profile.json",
            vec!["--credentials", profile],
            variables(&[("MUSTER_API_URL", other_url)]),
            profile,
        ),
        (
            "profile.json",
            vec![],
            variables(&[("MUSTER_CREDENTIALS", profile), ("MUSTER_API_URL", other_url)]),
            profile,
        ),
        ("none", vec!["--api-url", other_url, "--namespace", "ci"], variables(&own_key), "MUSTER_KEY"),
    ];
    for (file, arguments, variables, expected) in cases {
        for command in [vec!["instance", "list"], vec!["namespace", "delete", "ci"]] {
            let directory = tempfile::tempdir_in(home.path()).unwrap();
            // A profile has a fixed path, the default files are below a new home directory.
            let path = if file == "profile.json" { profile.into() } else { directory.path().join(file) };
            save(&path, &own_url);
            let output = Command::new(env!("CARGO_BIN_EXE_muster"))
                .args(&arguments)
                .args(command)
                .env_clear()
                .env("HOME", directory.path())
                .envs(variables.clone())
                .output()
                .unwrap();
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(
                !output.status.success() && error.contains("not for"),
                "{arguments:?} {variables:?}: {error}"
            );
            assert!(error.contains(expected) && !error.contains("hunter2"), "{arguments:?}: {error}");
        }
    }
    let refused_login = Command::new(env!("CARGO_BIN_EXE_muster"))
        .args(["--api-url", other_url, "--namespace", "ci", "login"])
        .env_clear()
        .env("HOME", home.path())
        .envs(own_key)
        .output()
        .unwrap();
    assert!(!refused_login.status.success());
    assert_eq!(other.accept().unwrap_err().kind(), ErrorKind::WouldBlock, "a connection was made");
}
