use std::os::unix::fs::{MetadataExt, PermissionsExt};

use super::*;

/// A sandbox with an input file and an output directory.
struct TestSandbox {
    sandbox: Sandbox,
    dir: tempfile::TempDir,
}

impl TestSandbox {
    fn new() -> Option<Self> {
        let sandbox = match Sandbox::find("nobody") {
            Ok(sandbox) => sandbox,
            Err(reason) => {
                muster_testing::skipped(&reason.to_string());
                return None;
            }
        };
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("input"), "the input").unwrap();
        fs::set_permissions(path("input"), fs::Permissions::from_mode(0o444)).unwrap();
        fs::write(path("secret"), "the secret").unwrap();
        fs::create_dir(path("out")).unwrap();
        let (uid, gid) = sandbox.owner();
        std::os::unix::fs::chown(path("out"), Some(uid), Some(gid)).unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
        Some(Self { sandbox, dir })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn run(
        &self,
        script: &str,
        timeout: Duration,
        should_continue: &dyn Fn() -> bool,
    ) -> (SandboxExit, String) {
        let end = self.sandbox.run(SandboxCommand {
            program: Path::new("/usr/bin/sh"),
            arguments: &["-c", script],
            input: Some(&self.path("input")),
            base: None,
            output: Some(&self.path("out")),
            stdin: None,
            stdout: File::create(self.path("stdout")).unwrap(),
            stderr: File::create(self.path("stderr")).unwrap(),
            file_size: 1 << 20,
            timeout,
            should_continue,
        });
        let output = ["stdout", "stderr"].map(|name| fs::read_to_string(self.path(name)).unwrap()).concat();
        (end.unwrap(), output)
    }

    fn output_of(&self, script: &str) -> String {
        let (end, output) = self.run(script, Duration::from_secs(20), &|| true);
        assert_eq!(end, SandboxExit::Code(0), "{script}: {output}");
        output.trim().to_owned()
    }

    fn assert_fails(&self, script: &str) {
        let (end, output) = self.run(script, Duration::from_secs(20), &|| true);
        assert!(matches!(end, SandboxExit::Code(1..)), "{script}: {end:?} {output}");
    }
}

#[test]
fn program_sees_only_its_input_and_output() {
    let Some(sandbox) = TestSandbox::new() else { return };
    assert_eq!(sandbox.output_of("cat /in"), "the input");
    assert_eq!(
        sandbox.output_of("ls -A /").replace("libx32\n", "").replace("lib32\n", ""),
        "bin\ndev\nin\nlib\nlib64\nout\nsbin\nusr"
    );
    sandbox.assert_fails(&format!("cat {}", sandbox.path("secret").display()));
    for script in ["echo x > /in", "echo x > /x", "touch /usr/x", "rm /in", "mkdir /out/../x", "ls /old"] {
        sandbox.assert_fails(script);
    }
    for host in ["/etc/passwd", "/proc/self/status", "/sys/kernel", "/dev/vda", "/root", "/tmp", "/run"] {
        sandbox.assert_fails(&format!("ls {host}"));
    }
    sandbox.output_of("echo x > /out/file");
    let metadata = fs::metadata(sandbox.path("out/file")).unwrap();
    assert_eq!((metadata.uid(), metadata.gid()), sandbox.sandbox.owner());
    assert_eq!(fs::read_to_string(sandbox.path("input")).unwrap(), "the input");
}

#[test]
fn program_has_no_privileges_no_network_and_no_other_processes() {
    let Some(sandbox) = TestSandbox::new() else { return };
    let (uid, gid) = sandbox.sandbox.owner();
    assert_eq!(sandbox.output_of("id -u; id -g"), format!("{uid}\n{gid}"));
    assert_eq!(sandbox.output_of("echo $$"), "1");
    // Perl is on every Debian system and can make system calls.
    let connect = "use Socket; socket(S, PF_INET, SOCK_STREAM, 0) or exit 0; \
                   exit(connect(S, sockaddr_in(22, inet_aton('127.0.0.1'))) ? 1 : 0)";
    sandbox.output_of(&format!("perl -e \"{connect}\""));
    for script in ["mount -t tmpfs x /out", "chown 0 /out", "unshare -m true && mount -t tmpfs x /out"] {
        sandbox.assert_fails(script);
    }
    // A set-user-ID program grants no privileges.
    assert_eq!(
        sandbox.output_of("test ! -u /usr/bin/su || su -c id </dev/null 2>&1 | grep -c uid=0 || true").trim(),
        "0"
    );
    assert_eq!(
        sandbox.output_of("ulimit -c; ulimit -n; ulimit -v"),
        format!("0\n64\n{}", MEMORY_LIMIT / 1024)
    );
}

#[test]
fn program_that_exceeds_its_limits_is_killed() {
    let Some(sandbox) = TestSandbox::new() else { return };
    let long = Duration::from_secs(20);
    let (end, _) = sandbox.run("exec cat /usr/bin/* > /out/large", long, &|| true);
    // SIGXFSZ does not kill the first process of a PID namespace, which gets an error instead.
    assert_eq!(end, SandboxExit::Code(1));
    assert_eq!(fs::metadata(sandbox.path("out/large")).unwrap().len(), 1 << 20);
    let (end, _) = sandbox.run("exec sleep 600", Duration::from_millis(300), &|| true);
    assert_eq!(end, SandboxExit::TimedOut);
    let (end, _) = sandbox.run("sleep 600 & exec sleep 600", long, &|| false);
    assert_eq!(end, SandboxExit::Cancelled);
    let (end, _) = sandbox.run("while :; do :; done", Duration::from_secs(1), &|| true);
    assert!(matches!(end, SandboxExit::TimedOut | SandboxExit::Code(137 | 152)), "{end:?}");
    let (end, output) = sandbox.run("perl -e '$x = \"x\" x (3 << 30)'", long, &|| true);
    assert!(matches!(end, SandboxExit::Code(1..)), "{end:?} {output}");
}

#[test]
fn refuses_unknown_and_privileged_users() {
    if !Uid::effective().is_root() {
        return muster_testing::skipped("root");
    }
    assert!(Sandbox::find("no-such-user").unwrap_err().to_string().contains("does not exist"));
    assert!(Sandbox::find("root").unwrap_err().to_string().contains("must not be root"));
}

#[test]
fn only_system_programs_are_in_the_sandbox() {
    assert_eq!(path_in_sandbox(Path::new("/bin/sh")).unwrap().parent(), Some(Path::new("/usr/bin")));
    assert_eq!(path_in_sandbox(Path::new("/etc/passwd")), None);
}
