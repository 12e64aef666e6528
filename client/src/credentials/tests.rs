use std::os::unix::fs::PermissionsExt as _;

use tempfile::TempDir;

use super::*;

fn credentials_of(namespace: &str) -> Credentials {
    Credentials {
        namespace: namespace.into(),
        key: Secret::new(format!("key of {namespace}")),
        apiurl: format!("http://{namespace}:13000"),
    }
}

fn files(directory: &TempDir) -> CredentialFiles {
    CredentialFiles {
        profile: None,
        login: Some(directory.path().join("config/muster/credentials.json")),
        daemon: directory.path().join("data/credentials.json"),
    }
}

#[test]
fn precedence_is_options_then_given_file_then_login_then_daemon() {
    let directory = tempfile::tempdir().unwrap();
    let files = files(&directory);
    let named = directory.path().join("mine.json");
    let given = |file: Option<&Path>| CredentialOptions {
        file: file.map(Path::to_owned),
        ..CredentialOptions::default()
    };

    save(&files.daemon, &credentials_of("daemon")).unwrap();
    assert_eq!(resolve(&given(None), &files).unwrap(), credentials_of("daemon"));
    save(files.login.as_ref().unwrap(), &credentials_of("login")).unwrap();
    assert_eq!(resolve(&given(None), &files).unwrap(), credentials_of("login"));
    save(&named, &credentials_of("named")).unwrap();
    assert_eq!(resolve(&given(Some(&named)), &files).unwrap(), credentials_of("named"));
    let flags = credentials_of("flags");
    let all = CredentialOptions {
        namespace: Some(flags.namespace.clone()),
        key: Some(flags.key.clone()),
        apiurl: Some(flags.apiurl.clone()),
        file: Some(named),
        ..CredentialOptions::default()
    };
    assert_eq!(resolve(&all, &files).unwrap(), flags);
}

#[test]
fn option_replaces_one_field_of_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let files = files(&directory);
    save(&files.daemon, &credentials_of("daemon")).unwrap();
    let found =
        resolve(&CredentialOptions { namespace: Some("ci".into()), ..CredentialOptions::default() }, &files)
            .unwrap();
    assert_eq!(found, Credentials { namespace: "ci".into(), ..credentials_of("daemon") });
    let key = Secret::new("mine");
    let found =
        resolve(&CredentialOptions { key: Some(key.clone()), ..CredentialOptions::default() }, &files);
    assert_eq!(found.unwrap(), Credentials { key, ..credentials_of("daemon") });
}

fn for_url(apiurl: &str) -> CredentialOptions {
    CredentialOptions { apiurl: Some(apiurl.into()), ..CredentialOptions::default() }
}

#[test]
fn file_is_used_only_for_its_own_url() {
    let directory = tempfile::tempdir().unwrap();
    let files = files(&directory);
    save(&files.daemon, &credentials_of("daemon")).unwrap();
    for same in ["http://daemon:13000", "http://daemon:13000/", "HTTP://DAEMON:13000"] {
        assert_eq!(resolve(&for_url(same), &files).unwrap().key, credentials_of("daemon").key, "{same}");
    }
    for other in [
        "http://other:13000",
        "https://daemon:13000",
        "http://daemon:13001",
        "http://daemon",
        "http://daemon:13000/proxy",
        "http://daemon:13000@other",
        "daemon:13000",
    ] {
        for namespace in [None, Some("ci".to_owned())] {
            for file in [None, Some(files.daemon.clone())] {
                let given = CredentialOptions { namespace: namespace.clone(), file, ..for_url(other) };
                let error = resolve(&given, &files).unwrap_err().to_string();
                let expected = format!(
                    "credentials {} are for http://daemon:13000, not for {other}, and were not sent; ",
                    files.daemon.display()
                );
                assert!(error.starts_with(&expected), "{error}");
            }
        }
    }
}

#[test]
fn url_selects_the_default_file() {
    let directory = tempfile::tempdir().unwrap();
    let files = files(&directory);
    save(&files.daemon, &credentials_of("daemon")).unwrap();
    save(files.login.as_ref().unwrap(), &credentials_of("login")).unwrap();
    assert_eq!(resolve(&for_url("http://daemon:13000"), &files).unwrap(), credentials_of("daemon"));
    let error = resolve(&for_url("http://other"), &files).unwrap_err().to_string();
    for part in ["are for http://login:13000", "are for http://daemon:13000"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn key_of_the_environment_is_used_only_for_its_own_url() {
    let directory = tempfile::tempdir().unwrap();
    let files = files(&directory);
    save(&files.daemon, &credentials_of("daemon")).unwrap();
    let key = |text: &str| Some(Secret::new(text));
    let resolved = |chosen: &str, apiurl: Option<&str>, own: Option<&str>| {
        let environment = EnvironmentCredentials { key: key("stored"), apiurl: own.map(str::to_owned) };
        let given = CredentialOptions {
            namespace: Some("ci".into()),
            key: key(chosen),
            apiurl: apiurl.map(str::to_owned),
            environment,
            ..CredentialOptions::default()
        };
        resolve(&given, &files).map(|found| found.apiurl).map_err(|error| error.to_string())
    };
    let error = resolved("stored", Some("http://b"), Some("http://a")).unwrap_err();
    assert!(error.starts_with("MUSTER_KEY is for MUSTER_API_URL http://a, not for http://b"), "{error}");
    for url in [None, Some("http://b")] {
        let error = resolved("stored", url, None).unwrap_err();
        assert!(error.starts_with("MUSTER_KEY is set without a URL") && error.contains("--key"), "{error}");
    }
    assert_eq!(resolved("stored", Some("http://a/"), Some("http://a")).unwrap(), "http://a/");
    assert_eq!(resolved("--key", Some("http://b"), Some("http://a")).unwrap(), "http://b");
    assert_eq!(resolved("--key", None, None).unwrap(), "http://daemon:13000");
}

#[test]
fn missing_credentials_error_names_the_searched_files() {
    let directory = tempfile::tempdir().unwrap();
    let files = files(&directory);
    let error =
        resolve(&CredentialOptions { namespace: Some("ci".into()), ..CredentialOptions::default() }, &files)
            .unwrap_err();
    let error = error.to_string();
    for part in [files.login.as_ref().unwrap(), &files.daemon].map(|path| path.display().to_string()) {
        assert!(error.contains(&part), "{error}");
    }
    assert!(error.contains("muster login") && !error.contains('\n'), "{error}");
}

#[test]
fn reports_a_missing_file() {
    let directory = tempfile::tempdir().unwrap();
    save(&files(&directory).daemon, &credentials_of("daemon")).unwrap();
    let given = CredentialOptions { file: Some("/no/such/file".into()), ..CredentialOptions::default() };
    let error = resolve(&given, &files(&directory)).unwrap_err();
    assert_eq!(error.to_string(), "credentials /no/such/file: no such file");
}

#[test]
fn reports_an_unreadable_file_instead_of_skipping_it() {
    let directory = tempfile::tempdir().unwrap();
    let files = files(&directory);
    save(&files.daemon, &credentials_of("daemon")).unwrap();
    // A directory cannot be read as a file, not even by root.
    let login = files.login.as_ref().unwrap();
    fs::create_dir_all(login).unwrap();
    let error = resolve(&CredentialOptions::default(), &files).unwrap_err().to_string();
    assert_eq!(error, format!("cannot read credentials {}: is a directory", login.display()));
}

#[test]
fn names_a_damaged_file_without_quoting_it() {
    let directory = tempfile::tempdir().unwrap();
    let files = files(&directory);
    fs::create_dir_all(files.daemon.parent().unwrap()).unwrap();
    for text in ["\"hunter2\"", "{\"key\": \"hunter2\"}", "{\n\"key\": hunter2", "hunter2"] {
        fs::write(&files.daemon, text).unwrap();
        let error = resolve(&CredentialOptions::default(), &files).unwrap_err().to_string();
        assert!(error.contains("data/credentials.json: line ") && !error.contains("hunter2"), "{error}");
    }
}

#[test]
fn saved_file_is_readable_only_by_its_owner() {
    let directory = tempfile::tempdir().unwrap();
    let path = files(&directory).login.unwrap();
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, "open to all").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    save(&path, &credentials_of("ci")).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    assert!(remove(&path).unwrap());
    assert!(!remove(&path).unwrap());
}

#[test]
fn user_directories_follow_absolute_xdg_settings() {
    let dir = |set: &str| user_dir(Some(set.into()), Some("/home/me".into()), ".config");
    assert_eq!(dir("/elsewhere").unwrap(), Path::new("/elsewhere/muster"));
    for ignored in ["", "relative"] {
        assert_eq!(dir(ignored).unwrap(), Path::new("/home/me/.config/muster"));
    }
    assert_eq!(user_dir(None, None, ".config"), None);
}

#[test]
fn login_is_saved_in_the_given_file_or_the_default_one() {
    assert_eq!(login_file(Some("/x/y.json".into())).unwrap(), PathBuf::from("/x/y.json"));
    let default = CredentialFiles::for_current_user().login;
    assert_eq!(login_file(None).ok(), default);
    assert_eq!(login_file(Some(PathBuf::new())).ok(), default, "an empty variable counts as unset");
}
