//! The tools that inspect and convert images, each run in the sandbox with limits that fit its task.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::Read;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::time::Duration;

use muster_types::blob::{Compression, ImageFacts, ImageFormat};
use muster_types::{Error, Result};
use serde_json::Value;

use super::ImageJob;
use super::error::ImagesError;
use super::format::invalid;
use super::sandbox::{Sandbox, SandboxCommand, SandboxExit, path_in_sandbox};
use crate::command::{Commands, Tool};
use crate::files::io_error;

/// The limit for decompression: at least this much, and beyond it this many times the compressed size.
const MIN_DECOMPRESSED_LIMIT: u64 = 1 << 30;
const MAX_COMPRESSION_RATIO: u64 = 100;

/// The minimum throughput of decompression and conversion, in bytes per second.
const MIN_THROUGHPUT: u64 = 10 << 20;

/// The timeout for reading a header, and the base of all other timeouts.
const BASE_TIMEOUT: Duration = Duration::from_secs(60);

/// The maximum number of bytes that are read of a tool's output.
const MAX_OUTPUT: u64 = 1 << 20;

/// The maximum number of characters of it that are logged.
const MAX_LOGGED_CHARS: usize = 300;

/// The minimum free space to start a tool.
const MIN_FREE_SPACE: u64 = 1 << 20;

/// A tool that failed this close to the end of the free space may have failed for lack of it: some write several
/// parts concurrently.
const FREE_SPACE_MARGIN: u64 = 64 << 20;

/// The exit codes of a program that cannot be run, for example because one of its libraries is missing.
const CANNOT_EXECUTE: i32 = 126;
const NOT_FOUND: i32 = 127;

/// The number of bytes of the guest's disk that determine whether it contains an image.
const GUEST_HEADER_SIZE: &str = "65536";

/// The tools of this host and the sandbox.
#[derive(Debug, Clone)]
pub(super) struct Tools {
    sandbox: Sandbox,
    qemu_img: PathBuf,
    gzip: PathBuf,
    xz: PathBuf,
}

/// A run of a tool.
struct ToolRun<'a> {
    tool: &'a Path,
    arguments: &'a [&'a str],
    file: &'a Path,
    /// Whether the file is passed as standard input rather than as `/in`.
    on_stdin: bool,
    /// The base of the image, if it has one.
    base: Option<&'a Path>,
    /// Files that the tool changes, with their names in `/out`.
    changed: &'a [(&'a Path, &'a str)],
    /// The maximum size of an output file.
    file_size: u64,
    timeout: Duration,
}

/// A qcow2 image and its base.
#[derive(Debug)]
pub(super) struct Layers<'a> {
    pub(super) top: &'a Path,
    pub(super) base: Option<(&'a Path, ImageFormat)>,
    /// The size of the disk in bytes.
    pub(super) virtual_size: u64,
}

impl Layers<'_> {
    /// Returns a complete description of the image, so that the tool neither guesses formats nor opens other files.
    fn source(&self) -> String {
        let file = |name: &str| serde_json::json!({ "driver": "file", "filename": name });
        let base = self
            .base
            .map(|(_, format)| serde_json::json!({ "driver": tool_format(format), "file": file("/base") }));
        format!("json:{}", serde_json::json!({ "driver": "qcow2", "file": file("/in"), "backing": base }))
    }

    fn run<'a>(&'a self, tool: &'a Path, arguments: &'a [&'a str], max_size: u64) -> Result<ToolRun<'a>> {
        let size = |path: &Path| fs::metadata(path).map(|found| found.len());
        let sizes = size(self.top).and_then(|top| Ok(top + self.base.map_or(Ok(0), |(base, _)| size(base))?));
        let sizes = sizes.map_err(io_error("failed to inspect an image"))?;
        let base = self.base.map(|(base, _)| base);
        let timeout = timeout_for(sizes + self.virtual_size.min(max_size));
        let (file, changed) = (self.top, &[][..]);
        Ok(ToolRun { tool, arguments, file, on_stdin: false, base, changed, file_size: max_size, timeout })
    }
}

/// The result of a tool.
struct ToolOutcome {
    exit: SandboxExit,
    /// The file with its standard output.
    stdout: PathBuf,
    /// The directory that it saw as `/out`.
    output_dir: PathBuf,
}

impl Tools {
    pub(super) fn find(commands: &Commands, user: &str) -> Result<Self, ImagesError> {
        let find = |tool: Tool| {
            let found = commands.path(tool).and_then(path_in_sandbox);
            found.ok_or_else(|| {
                format!("the program {} (Debian package {}) is not in /usr/bin", tool.name(), tool.package())
            })
        };
        let (qemu_img, gzip, xz) = (find(Tool::QemuImg)?, find(Tool::Gzip)?, find(Tool::Xz)?);
        Ok(Self { sandbox: Sandbox::find(user)?, qemu_img, gzip, xz })
    }

    /// Returns the tools, which are searched for once for all simulated nodes.
    pub(super) fn shared(user: &str) -> Result<Self, ImagesError> {
        static TOOLS: OnceLock<Result<Tools, ImagesError>> = OnceLock::new();
        TOOLS.get_or_init(|| Self::find(&Commands::find(), user)).clone()
    }

    fn run(&self, run: &ToolRun<'_>, job: &ImageJob) -> Result<ToolOutcome> {
        let free_space = (job.free_space)();
        if free_space < MIN_FREE_SPACE {
            return Err(disk_full());
        }
        let size = |(path, _): &(&Path, &str)| fs::metadata(path).map_or(0, |found| found.len());
        let changed_size: u64 = run.changed.iter().map(size).sum();
        let file_size = run.file_size.min(free_space.saturating_add(changed_size));
        let prepare = || -> std::io::Result<_> {
            let name = |what: &str| job.scratch.path(&format!("{what}-{}", uuid::Uuid::new_v4()));
            let (output_dir, stdout, stderr) = (name("out"), name("stdout"), name("stderr"));
            DirBuilder::new().mode(0o700).create(&output_dir)?;
            let (uid, gid) = self.sandbox.owner();
            std::os::unix::fs::chown(&output_dir, Some(uid), Some(gid))?;
            for (path, name) in run.changed {
                let linked = output_dir.join(name);
                fs::hard_link(path, &linked)?;
                std::os::unix::fs::chown(&linked, Some(uid), Some(gid))?;
            }
            let stdin = if run.on_stdin { Some(File::open(run.file)?) } else { None };
            let files = (stdin, File::create(&stdout)?, File::create(&stderr)?);
            Ok((output_dir, stdout, stderr, files))
        };
        let (output_dir, stdout, stderr, (stdin, out, err)) =
            prepare().map_err(io_error("failed to run an image tool"))?;
        let command = SandboxCommand {
            program: run.tool,
            arguments: run.arguments,
            input: (!run.on_stdin).then_some(run.file),
            base: run.base,
            output: Some(&output_dir),
            stdin,
            stdout: out,
            stderr: err,
            file_size,
            timeout: run.timeout,
            should_continue: &|| !job.cancelled.load(Ordering::Relaxed) && (job.free_space)() > 0,
        };
        let exit = self.sandbox.run(command).map_err(|error| {
            Error::Unavailable(format!("failed to run an image tool in the sandbox: {error}"))
        })?;
        if exit != SandboxExit::Code(0) {
            let program = run.tool.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let output: String = read_output(&stderr).chars().take(MAX_LOGGED_CHARS).collect();
            tracing::info!(program, ?exit, output, "image tool failed");
            if matches!(exit, SandboxExit::Code(CANNOT_EXECUTE | NOT_FOUND)) {
                let reason = output.lines().next().unwrap_or("no output");
                return Err(Error::Unavailable(format!(
                    "the program {program} cannot be run on the node, reinstall its Debian package: {reason}"
                )));
            }
        }
        match exit {
            SandboxExit::Cancelled if job.cancelled.load(Ordering::Relaxed) => {
                Err(Error::Unavailable("the request was cancelled".into()))
            }
            SandboxExit::Cancelled => Err(disk_full()),
            SandboxExit::Code(code) if code != 0 => {
                let largest = largest_output(&stdout, &output_dir);
                let is_out_of_space =
                    free_space < run.file_size && largest.saturating_add(FREE_SPACE_MARGIN) >= free_space;
                if is_out_of_space || (job.free_space)() < MIN_FREE_SPACE {
                    Err(disk_full())
                } else if largest >= run.file_size {
                    Err(invalid("the image is larger than allowed after decompression"))
                } else {
                    Ok(ToolOutcome { exit, stdout, output_dir })
                }
            }
            _ => Ok(ToolOutcome { exit, stdout, output_dir }),
        }
    }

    /// Decompresses an image, unless its compression ratio is suspicious.
    pub(super) fn decompress(
        &self,
        file: &Path,
        compression: Compression,
        max_size: u64,
        job: &ImageJob,
    ) -> Result<PathBuf> {
        let size = fs::metadata(file).map_err(io_error("failed to inspect an image"))?.len();
        let size_limit = max_decompressed_size(size, max_size);
        let (tool, arguments): (_, &[&str]) = match compression {
            Compression::Gzip => (&self.gzip, &["-dc"]),
            // A sparse file would not reach the size limit.
            Compression::Xz => (&self.xz, &["-dc", "--no-sparse", "-M", "512MiB"]),
        };
        let timeout = timeout_for(size + size_limit);
        let run = ToolRun {
            tool,
            arguments,
            file,
            on_stdin: true,
            base: None,
            changed: &[],
            file_size: size_limit,
            timeout,
        };
        let outcome = self.run(&run, job)?;
        match outcome.exit {
            SandboxExit::Code(0) => {
                // The next tool reads it as another user.
                let readable = fs::set_permissions(&outcome.stdout, Permissions::from_mode(0o644));
                readable.map_err(io_error("failed to set the mode of a decompressed image"))?;
                Ok(outcome.stdout)
            }
            SandboxExit::TimedOut => Err(invalid("decompressing the image takes too long")),
            _ => Err(invalid("the image cannot be decompressed: it is damaged, or needs too much memory")),
        }
    }

    /// Refuses an image about which `qemu-img` and our own parser disagree.
    pub(super) fn require_agreement(&self, file: &Path, facts: &ImageFacts, job: &ImageJob) -> Result<()> {
        let format = tool_format(facts.format);
        let arguments = ["info", "-f", format, "--output=json", "/in"];
        let outcome = self.run(&self.header_run(&arguments, file), job)?;
        let output: Option<Value> = serde_json::from_str(&read_output(&outcome.stdout)).ok();
        let output = output.filter(|_| outcome.exit == SandboxExit::Code(0));
        let output = output.ok_or_else(|| invalid("the image is damaged: its header cannot be read"))?;
        let has_backing_file = ["backing-filename", "full-backing-filename", "backing-filename-format"]
            .iter()
            .any(|key| output.get(key).is_some());
        let specific = |key: &str| output.pointer(&format!("/format-specific/data/{key}"));
        if has_backing_file || specific("data-file").is_some() {
            return Err(invalid("the image refers to another file, which could be any file of the host"));
        }
        let is_true = |value: Option<&Value>| value.and_then(Value::as_bool) == Some(true);
        if is_true(output.get("encrypted")) || specific("encrypt").is_some() {
            return Err(invalid("the image is encrypted"));
        }
        if is_true(specific("corrupt")) {
            return Err(invalid("the image is marked as corrupt"));
        }
        let same = output.get("format").and_then(Value::as_str) == Some(format)
            && output.get("virtual-size").and_then(Value::as_u64) == Some(facts.virtual_size);
        if same { Ok(()) } else { Err(invalid("the image has an inconsistent format or size")) }
    }

    /// Refuses a qcow2 image with damaged tables.
    pub(super) fn require_consistent_tables(&self, file: &Path, job: &ImageJob) -> Result<()> {
        let size = fs::metadata(file).map_err(io_error("failed to inspect an image"))?.len();
        let arguments = ["check", "-f", "qcow2", "--output=json", "/in"];
        let run = ToolRun { timeout: timeout_for(size), ..self.header_run(&arguments, file) };
        let outcome = self.run(&run, job)?;
        if outcome.exit == SandboxExit::TimedOut {
            return Err(invalid("checking the image takes too long"));
        }
        // Exit status 3 means leaked clusters, which are harmless.
        let output: Option<Value> = serde_json::from_str(&read_output(&outcome.stdout)).ok();
        let output = output.filter(|_| matches!(outcome.exit, SandboxExit::Code(0 | 3)));
        let none = |output: &Value, key: &str| output.get(key).is_none_or(|count| count.as_u64() == Some(0));
        if output.is_some_and(|output| none(&output, "corruptions") && none(&output, "check-errors")) {
            return Ok(());
        }
        Err(invalid("the image is damaged: its tables are inconsistent"))
    }

    /// Returns the beginning of the disk that a guest sees.
    pub(super) fn guest_header(&self, file: &Path, job: &ImageJob) -> Result<Vec<u8>> {
        let bs = format!("bs={GUEST_HEADER_SIZE}");
        let arguments = ["dd", "-f", "qcow2", "-O", "raw", &bs, "count=1", "if=/in", "of=/out/head"];
        let outcome = self.run(&self.header_run(&arguments, file), job)?;
        let path = outcome.output_dir.join("head");
        let head = open_regular_file(&path).and_then(|file| {
            let mut head = Vec::new();
            file.take(MAX_OUTPUT).read_to_end(&mut head).map(|_| head)
        });
        let head = head.ok().filter(|_| outcome.exit == SandboxExit::Code(0));
        head.ok_or_else(|| invalid("the image is damaged: the beginning of its disk cannot be read"))
    }

    fn header_run<'a>(&'a self, arguments: &'a [&'a str], file: &'a Path) -> ToolRun<'a> {
        let tool = &self.qemu_img;
        ToolRun {
            tool,
            arguments,
            file,
            on_stdin: false,
            base: None,
            changed: &[],
            file_size: MAX_OUTPUT,
            timeout: BASE_TIMEOUT,
        }
    }

    /// Converts an image to the format that VMs use.
    pub(super) fn convert(
        &self,
        file: &Path,
        facts: &ImageFacts,
        max_size: u64,
        job: &ImageJob,
    ) -> Result<PathBuf> {
        let size = fs::metadata(file).map_err(io_error("failed to inspect an image"))?.len();
        let format = tool_format(facts.format);
        let arguments =
            ["convert", "-f", format, "-O", "qcow2", "-o", "cluster_size=2M", "/in", "/out/image"];
        let timeout = timeout_for(size + facts.virtual_size.min(max_size));
        let tool = self.qemu_img.as_path();
        let file_size = match facts.format {
            ImageFormat::Qcow2 => max_decompressed_size(size, max_size),
            ImageFormat::Raw | ImageFormat::Iso => max_size,
        };
        let run = ToolRun { tool, file_size, timeout, ..self.header_run(&arguments, file) };
        self.run_conversion(&run, job)
    }

    /// Converts a qcow2 image together with its base to the format that VMs use.
    pub(super) fn flatten(&self, layers: &Layers<'_>, max_size: u64, job: &ImageJob) -> Result<PathBuf> {
        let source = layers.source();
        let arguments = ["convert", "-O", "qcow2", "-o", "cluster_size=2M", &source, "/out/image"];
        self.run_conversion(&layers.run(&self.qemu_img, &arguments, max_size)?, job)
    }

    /// Copies a disk. A thin copy contains only the differences to its base, and does not name the base.
    pub(super) fn copy(
        &self,
        layers: &Layers<'_>,
        thin: bool,
        compress: bool,
        max_size: u64,
        job: &ImageJob,
    ) -> Result<PathBuf> {
        let source = layers.source();
        let mut arguments = vec!["convert", "-O", "qcow2"];
        if compress {
            arguments.extend(["-c", "-o", "compression_type=zstd"]);
        }
        let base = layers.base.filter(|_| thin);
        if let Some((_, format)) = base {
            // Makes zeroes on top of the base explicit.
            arguments.extend(["-B", "/base", "-F", tool_format(format)]);
        }
        arguments.extend([source.as_str(), "/out/image"]);
        let copied = self.run_conversion(&layers.run(&self.qemu_img, &arguments, max_size)?, job)?;
        if base.is_some() {
            super::qcow2_writer::remove_backing_file(&copied)
                .map_err(io_error("failed to finish a copy of a disk"))?;
        }
        Ok(copied)
    }

    /// Writes the changes that an image contains to its base. After a failure it can be repeated.
    pub(super) fn merge(&self, top: &Path, base: &Path, job: &ImageJob) -> Result<()> {
        let file = |name: &str| serde_json::json!({ "driver": "file", "filename": name });
        let image = serde_json::json!({
            "driver": "qcow2", "file": file("/out/top"),
            "backing": { "driver": "qcow2", "file": file("/out/base"), "backing": null },
        });
        let image = format!("json:{image}");
        // Without emptying the image, which is removed afterwards.
        let arguments = ["commit", "-q", "-d", &image];
        let size = fs::metadata(top).map_err(io_error("failed to inspect an image"))?.len();
        let run = ToolRun {
            changed: &[(top, "top"), (base, "base")],
            file_size: u64::MAX,
            timeout: timeout_for(size),
            ..self.header_run(&arguments, top)
        };
        match self.run(&run, job)?.exit {
            SandboxExit::Code(0) => Ok(()),
            SandboxExit::TimedOut => {
                Err(Error::Unavailable("merging a copy of a disk takes too long".into()))
            }
            _ => Err(Error::Unavailable("a copy of a disk cannot be merged with the last one".into())),
        }
    }

    fn run_conversion(&self, run: &ToolRun<'_>, job: &ImageJob) -> Result<PathBuf> {
        let outcome = self.run(run, job)?;
        match outcome.exit {
            SandboxExit::Code(0) => {}
            SandboxExit::TimedOut => return Err(invalid("converting the image takes too long")),
            _ => return Err(invalid("the image is damaged: it cannot be converted")),
        }
        let output = outcome.output_dir.join("image");
        let target = job.scratch.path("image");
        // The directory belongs to another user, who may have put anything under that name.
        let moved = open_regular_file(&output).and_then(|_| fs::rename(&output, &target));
        moved.map_err(io_error("failed to take ownership of a conversion"))?;
        if self.sandbox.owner().0 != nix::unistd::geteuid().as_raw() {
            let (uid, gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
            std::os::unix::fs::chown(&target, Some(uid), Some(gid))
                .map_err(io_error("failed to take ownership of a conversion"))?;
        }
        Ok(target)
    }
}

/// Returns the size limit for decompressing an image, and for converting a qcow2 image.
pub(super) fn max_decompressed_size(size: u64, max_size: u64) -> u64 {
    MIN_DECOMPRESSED_LIMIT.max(size.saturating_mul(MAX_COMPRESSION_RATIO)).min(max_size)
}

fn tool_format(format: ImageFormat) -> &'static str {
    match format {
        ImageFormat::Qcow2 => "qcow2",
        ImageFormat::Raw | ImageFormat::Iso => "raw",
    }
}

fn timeout_for(bytes: u64) -> Duration {
    BASE_TIMEOUT + Duration::from_secs(bytes / MIN_THROUGHPUT)
}

/// Opens a regular file without following a symbolic link.
fn open_regular_file(path: &Path) -> std::io::Result<File> {
    let file =
        File::options().read(true).custom_flags(nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(std::io::ErrorKind::InvalidData.into()) }
}

/// Reads the output of a tool, up to [`MAX_OUTPUT`]; empty if it cannot be read.
fn read_output(path: &Path) -> String {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MAX_OUTPUT).read_to_end(&mut bytes));
    read.map_or_else(|_| String::new(), |_| String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns the size of the largest file that a tool wrote.
fn largest_output(stdout: &Path, output_dir: &Path) -> u64 {
    let files = fs::read_dir(output_dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let sizes = files.chain([stdout.to_owned()]).filter_map(|path| fs::symlink_metadata(path).ok());
    sizes.map(|found| found.len()).max().unwrap_or(0)
}

fn disk_full() -> Error {
    Error::InsufficientCapacity("the node does not have enough disk space for the image".into())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::files::ScratchDir;

    #[test]
    fn program_that_cannot_be_run_is_not_a_damaged_image() {
        let sandbox = match Sandbox::find("nobody") {
            Ok(sandbox) => sandbox,
            Err(reason) => return muster_testing::skipped(&reason.to_string()),
        };
        // It exits as if it lacked a library: it cannot open the script `info`.
        let bash = PathBuf::from("/usr/bin/bash");
        let tools = Tools { sandbox, qemu_img: bash.clone(), gzip: bash.clone(), xz: bash };
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
        let image = dir.path().join("image");
        fs::write(&image, [0; 512]).unwrap();
        let job = ImageJob {
            scratch: ScratchDir::create(dir.path().join("job")).unwrap(),
            free_space: Box::new(|| 1 << 30),
            cancelled: Arc::default(),
        };
        let facts = ImageFacts {
            format: ImageFormat::Raw,
            compression: None,
            virtual_size: 512,
            format_details: serde_json::Map::new(),
        };
        let error = tools.require_agreement(&image, &facts, &job).unwrap_err();
        assert!(matches!(error, Error::Unavailable(_)), "{error:?}");
        assert!(error.to_string().starts_with("the program bash cannot be run on the node"), "{error}");
    }

    #[test]
    fn limits_the_compression_ratio_of_large_images_only() {
        const GIB: u64 = 1 << 30;
        assert_eq!(max_decompressed_size(10, 256 * GIB), GIB);
        assert_eq!(max_decompressed_size(10 << 20, 256 * GIB), GIB);
        assert_eq!(max_decompressed_size(GIB, 256 * GIB), 100 * GIB);
        assert_eq!(max_decompressed_size(10 * GIB, 256 * GIB), 256 * GIB);
        assert_eq!(max_decompressed_size(u64::MAX, 5), 5);
    }
}
