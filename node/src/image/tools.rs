//! The tools that look into images, each run locked in, with limits that fit what it has to do.

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

use super::Job;
use super::format::refuse;
use super::sandbox::{End, Order, Sandbox, inside};
use crate::command::{Commands, Tool};
use crate::storage::failed;

/// A packed image may always unpack to this much, and beyond it to so many times its own size.
const SMALL: u64 = 1 << 30;
const RATIO: u64 = 100;

/// The slowest that unpacking and converting may be, in bytes per second.
const SLOWEST: u64 = 10 << 20;

/// For what only reads a header, and for everything else beside the bytes themselves.
const QUICK: Duration = Duration::from_secs(60);

/// The most that is read of what a tool says.
const MOST_WORDS: u64 = 1 << 20;

/// The most of it that is repeated in the log.
const LOGGED: usize = 300;

/// With less room than this, no tool is even begun.
const LEAST_ROOM: u64 = 1 << 20;

/// How far from the end of its room a tool may have failed for the lack of it: some write several parts at once.
const CLOSE: u64 = 64 << 20;

/// How much of the guest's disk tells whether it is an image again.
const GUEST_HEAD: &str = "65536";

/// The tools of this machine and the place to run them.
#[derive(Debug, Clone)]
pub(super) struct Tools {
    sandbox: Sandbox,
    qemu_img: PathBuf,
    gzip: PathBuf,
    xz: PathBuf,
}

/// What a tool is to do.
struct Task<'a> {
    tool: &'a Path,
    arguments: &'a [&'a str],
    file: &'a Path,
    /// The file goes to its standard input rather than to `/in`.
    streamed: bool,
    /// What the file lies on, if it does.
    base: Option<&'a Path>,
    /// The most that it may write.
    file_size: u64,
    limit: Duration,
}

/// A qcow2 image, and what it lies on.
#[derive(Debug)]
pub(super) struct Layers<'a> {
    pub(super) top: &'a Path,
    pub(super) base: Option<(&'a Path, ImageFormat)>,
    /// Of the disk, in bytes.
    pub(super) virtual_size: u64,
}

impl Layers<'_> {
    /// Spelled out, so that the tool neither guesses nor looks for anything else.
    fn source(&self) -> String {
        let file = |name: &str| serde_json::json!({ "driver": "file", "filename": name });
        let base = self
            .base
            .map(|(_, format)| serde_json::json!({ "driver": tool_format(format), "file": file("/base") }));
        format!("json:{}", serde_json::json!({ "driver": "qcow2", "file": file("/in"), "backing": base }))
    }

    fn task<'a>(&'a self, tool: &'a Path, arguments: &'a [&'a str], most: u64) -> Result<Task<'a>> {
        let size = |path: &Path| fs::metadata(path).map(|found| found.len());
        let sizes = size(self.top).and_then(|top| Ok(top + self.base.map_or(Ok(0), |(base, _)| size(base))?));
        let sizes = sizes.map_err(failed("an image cannot be looked at"))?;
        let base = self.base.map(|(base, _)| base);
        let limit = time_for(sizes + self.virtual_size.min(most));
        Ok(Task { tool, arguments, file: self.top, streamed: false, base, file_size: most, limit })
    }
}

/// What is left of a tool.
struct Left {
    end: End,
    /// What it wrote to standard output.
    stdout: PathBuf,
    /// The folder that it saw as `/out`.
    folder: PathBuf,
}

impl Tools {
    pub(super) fn find(commands: &Commands, user: &str) -> Result<Self, String> {
        let find = |tool: Tool| {
            let found = commands.path(tool).and_then(inside);
            found.ok_or_else(|| {
                format!("the program {} in /usr/bin (Debian package {})", tool.name(), tool.package())
            })
        };
        let (qemu_img, gzip, xz) = (find(Tool::QemuImg)?, find(Tool::Gzip)?, find(Tool::Xz)?);
        Ok(Self { sandbox: Sandbox::find(user)?, qemu_img, gzip, xz })
    }

    /// Looked for once, however many nodes are simulated.
    pub(super) fn shared(user: &str) -> Result<Self, String> {
        static TOOLS: OnceLock<Result<Tools, String>> = OnceLock::new();
        TOOLS.get_or_init(|| Self::find(&Commands::find(), user)).clone()
    }

    fn run(&self, task: &Task<'_>, job: &Job) -> Result<Left> {
        let room = (job.room)();
        if room < LEAST_ROOM {
            return Err(full());
        }
        let file_size = task.file_size.min(room);
        let io = failed("a tool for images cannot be run");
        let prepare = || -> std::io::Result<_> {
            let name = |what: &str| job.scratch.path(&format!("{what}-{}", uuid::Uuid::new_v4()));
            let (folder, stdout, stderr) = (name("out"), name("stdout"), name("stderr"));
            DirBuilder::new().mode(0o700).create(&folder)?;
            let (uid, gid) = self.sandbox.owner();
            std::os::unix::fs::chown(&folder, Some(uid), Some(gid))?;
            let stdin = if task.streamed { Some(File::open(task.file)?) } else { None };
            let order = (stdin, File::create(&stdout)?, File::create(&stderr)?);
            Ok((folder, stdout, stderr, order))
        };
        let (folder, stdout, stderr, (stdin, out, err)) = prepare().map_err(io)?;
        let order = Order {
            program: task.tool,
            arguments: task.arguments,
            input: (!task.streamed).then_some(task.file),
            base: task.base,
            output: Some(&folder),
            stdin,
            stdout: out,
            stderr: err,
            file_size,
            limit: task.limit,
            go_on: &|| !job.given_up.load(Ordering::Relaxed) && (job.room)() > 0,
        };
        let end = self.sandbox.run(order).map_err(|error| {
            Error::Unavailable(format!("looking at images: a program cannot be locked in: {error}"))
        })?;
        if end != End::Code(0) {
            let program = task.tool.file_name().unwrap_or_default().to_string_lossy().into_owned();
            tracing::info!(program, ?end, said = %words(&stderr).chars().take(LOGGED).collect::<String>(), "a tool for images failed");
        }
        match end {
            End::Stopped if job.given_up.load(Ordering::Relaxed) => {
                Err(Error::Unavailable("nobody waits for it any more".into()))
            }
            End::Stopped => Err(full()),
            End::Code(code) if code != 0 => {
                let most = most_written(&stdout, &folder);
                let no_room = room < task.file_size && most.saturating_add(CLOSE) >= room;
                if no_room || (job.room)() < LEAST_ROOM {
                    Err(full())
                } else if most >= task.file_size {
                    Err(refuse("the image becomes larger than is allowed when it is unpacked"))
                } else {
                    Ok(Left { end, stdout, folder })
                }
            }
            _ => Ok(Left { end, stdout, folder }),
        }
    }

    /// The unpacked bytes, if they are not suspiciously many.
    pub(super) fn unpack(&self, file: &Path, packing: Compression, most: u64, job: &Job) -> Result<PathBuf> {
        let size = fs::metadata(file).map_err(failed("an image cannot be looked at"))?.len();
        let bound = most_unpacked(size, most);
        let (tool, arguments): (_, &[&str]) = match packing {
            Compression::Gzip => (&self.gzip, &["-dc"]),
            // With holes, a file would be shorter than what went into it when it becomes too large.
            Compression::Xz => (&self.xz, &["-dc", "--no-sparse", "-M", "512MiB"]),
        };
        let limit = time_for(size + bound);
        let task = Task { tool, arguments, file, streamed: true, base: None, file_size: bound, limit };
        let left = self.run(&task, job)?;
        match left.end {
            End::Code(0) => {
                // The next tool reads it as another user.
                let readable = fs::set_permissions(&left.stdout, Permissions::from_mode(0o644));
                readable.map_err(failed("an unpacked image's mode is not set"))?;
                Ok(left.stdout)
            }
            End::TooLate => Err(refuse("the image takes too long to unpack")),
            _ => Err(refuse("the image cannot be unpacked: it is damaged, or needs too much memory")),
        }
    }

    /// Refuses an image of which the disk tool does not say what our own reader did.
    pub(super) fn require_agreement(&self, file: &Path, facts: &ImageFacts, job: &Job) -> Result<()> {
        let format = tool_format(facts.format);
        let arguments = ["info", "-f", format, "--output=json", "/in"];
        let left = self.run(&self.header_task(&arguments, file), job)?;
        let said: Option<Value> = serde_json::from_str(&words(&left.stdout)).ok();
        let said = said.filter(|_| left.end == End::Code(0));
        let said = said.ok_or_else(|| refuse("the image is damaged: its header cannot be read"))?;
        let refers = ["backing-filename", "full-backing-filename", "backing-filename-format"]
            .iter()
            .any(|key| said.get(key).is_some());
        let more = |key: &str| said.pointer(&format!("/format-specific/data/{key}"));
        if refers || more("data-file").is_some() {
            return Err(refuse("the image refers to another file, which could be any file of the host"));
        }
        let is_true = |value: Option<&Value>| value.and_then(Value::as_bool) == Some(true);
        if is_true(said.get("encrypted")) || more("encrypt").is_some() {
            return Err(refuse("the image is encrypted"));
        }
        if is_true(more("corrupt")) {
            return Err(refuse("the image is marked as corrupt"));
        }
        let same = said.get("format").and_then(Value::as_str) == Some(format)
            && said.get("virtual-size").and_then(Value::as_u64) == Some(facts.virtual_size);
        if same { Ok(()) } else { Err(refuse("the image contradicts itself about its format or its size")) }
    }

    /// Refuses a qcow2 image whose tables are damaged.
    pub(super) fn require_sound(&self, file: &Path, job: &Job) -> Result<()> {
        let size = fs::metadata(file).map_err(failed("an image cannot be looked at"))?.len();
        let arguments = ["check", "-f", "qcow2", "--output=json", "/in"];
        let task = Task { limit: time_for(size), ..self.header_task(&arguments, file) };
        let left = self.run(&task, job)?;
        if left.end == End::TooLate {
            return Err(refuse("the image takes too long to check"));
        }
        // 3: there are clusters that nothing refers to, which harm nobody.
        let said: Option<Value> = serde_json::from_str(&words(&left.stdout)).ok();
        let said = said.filter(|_| matches!(left.end, End::Code(0 | 3)));
        let none = |said: &Value, key: &str| said.get(key).is_none_or(|count| count.as_u64() == Some(0));
        if said.is_some_and(|said| none(&said, "corruptions") && none(&said, "check-errors")) {
            return Ok(());
        }
        Err(refuse("the image is damaged: its tables contradict each other"))
    }

    /// The first bytes of the disk that a guest sees.
    pub(super) fn guest_head(&self, file: &Path, job: &Job) -> Result<Vec<u8>> {
        let bs = format!("bs={GUEST_HEAD}");
        let arguments = ["dd", "-f", "qcow2", "-O", "raw", &bs, "count=1", "if=/in", "of=/out/head"];
        let left = self.run(&self.header_task(&arguments, file), job)?;
        let path = left.folder.join("head");
        let head = open_plain(&path).and_then(|file| {
            let mut head = Vec::new();
            file.take(MOST_WORDS).read_to_end(&mut head).map(|_| head)
        });
        let head = head.ok().filter(|_| left.end == End::Code(0));
        head.ok_or_else(|| refuse("the image is damaged: the beginning of its disk cannot be read"))
    }

    fn header_task<'a>(&'a self, arguments: &'a [&'a str], file: &'a Path) -> Task<'a> {
        let tool = &self.qemu_img;
        Task { tool, arguments, file, streamed: false, base: None, file_size: MOST_WORDS, limit: QUICK }
    }

    /// The image that machines use.
    pub(super) fn convert(&self, file: &Path, facts: &ImageFacts, most: u64, job: &Job) -> Result<PathBuf> {
        let size = fs::metadata(file).map_err(failed("an image cannot be looked at"))?.len();
        let format = tool_format(facts.format);
        let arguments =
            ["convert", "-f", format, "-O", "qcow2", "-o", "cluster_size=2M", "/in", "/out/image"];
        let limit = time_for(size + facts.virtual_size.min(most));
        let tool = self.qemu_img.as_path();
        let file_size = match facts.format {
            ImageFormat::Qcow2 => most_unpacked(size, most),
            ImageFormat::Raw | ImageFormat::Iso => most,
        };
        let task = Task { tool, arguments: &arguments, file, streamed: false, base: None, file_size, limit };
        self.convert_by(&task, job)
    }

    /// The image that machines use, of a qcow2 image that lies on another.
    pub(super) fn join(&self, layers: &Layers<'_>, most: u64, job: &Job) -> Result<PathBuf> {
        let source = layers.source();
        let arguments = ["convert", "-O", "qcow2", "-o", "cluster_size=2M", &source, "/out/image"];
        self.convert_by(&layers.task(&self.qemu_img, &arguments, most)?, job)
    }

    /// A copy of a disk. A thin one has only what differs from its base, and does not name that.
    pub(super) fn copy(
        &self,
        layers: &Layers<'_>,
        thin: bool,
        compress: bool,
        most: u64,
        job: &Job,
    ) -> Result<PathBuf> {
        let source = layers.source();
        let mut arguments = vec!["convert", "-O", "qcow2"];
        if compress {
            arguments.extend(["-c", "-o", "compression_type=zstd"]);
        }
        let base = layers.base.filter(|_| thin);
        if let Some((_, format)) = base {
            // What is empty on top of something is then written down as empty.
            arguments.extend(["-B", "/base", "-F", tool_format(format)]);
        }
        arguments.extend([source.as_str(), "/out/image"]);
        let copied = self.convert_by(&layers.task(&self.qemu_img, &arguments, most)?, job)?;
        if base.is_some() {
            super::fresh::forget_backing(&copied).map_err(failed("a copy of a disk is not finished"))?;
        }
        Ok(copied)
    }

    fn convert_by(&self, task: &Task<'_>, job: &Job) -> Result<PathBuf> {
        let left = self.run(task, job)?;
        match left.end {
            End::Code(0) => {}
            End::TooLate => return Err(refuse("the image takes too long to convert")),
            _ => return Err(refuse("the image is damaged: it cannot be converted")),
        }
        let made = left.folder.join("image");
        let taken = job.scratch.path("image");
        // The folder was another user's, who may have left anything under that name.
        let plain = open_plain(&made).and_then(|_| fs::rename(&made, &taken));
        plain.map_err(failed("a conversion cannot be taken over"))?;
        if self.sandbox.owner().0 != nix::unistd::geteuid().as_raw() {
            let (uid, gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
            std::os::unix::fs::chown(&taken, Some(uid), Some(gid))
                .map_err(failed("a conversion cannot be taken over"))?;
        }
        Ok(taken)
    }
}

/// How much a packed image may become, and a qcow2 image when it is converted.
pub(super) fn most_unpacked(size: u64, most: u64) -> u64 {
    SMALL.max(size.saturating_mul(RATIO)).min(most)
}

fn tool_format(format: ImageFormat) -> &'static str {
    match format {
        ImageFormat::Qcow2 => "qcow2",
        ImageFormat::Raw | ImageFormat::Iso => "raw",
    }
}

fn time_for(bytes: u64) -> Duration {
    QUICK + Duration::from_secs(bytes / SLOWEST)
}

/// A regular file, and not what a link leads to.
fn open_plain(path: &Path) -> std::io::Result<File> {
    let file =
        File::options().read(true).custom_flags(nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(std::io::ErrorKind::InvalidData.into()) }
}

/// What a tool said, as far as anybody reads it.
fn words(path: &Path) -> String {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MOST_WORDS).read_to_end(&mut bytes));
    read.map_or_else(|_| String::new(), |_| String::from_utf8_lossy(&bytes).into_owned())
}

/// The size of the largest file that a tool wrote.
fn most_written(stdout: &Path, folder: &Path) -> u64 {
    let inside = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let sizes = inside.chain([stdout.to_owned()]).filter_map(|path| fs::symlink_metadata(path).ok());
    sizes.map(|found| found.len()).max().unwrap_or(0)
}

fn full() -> Error {
    Error::Insufficient("the disk is full: the node has no room for the image".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_packed_may_become_as_much_as_images_do() {
        const GIB: u64 = 1 << 30;
        assert_eq!(most_unpacked(10, 256 * GIB), GIB);
        assert_eq!(most_unpacked(10 << 20, 256 * GIB), GIB);
        assert_eq!(most_unpacked(GIB, 256 * GIB), 100 * GIB);
        assert_eq!(most_unpacked(10 * GIB, 256 * GIB), 256 * GIB);
        assert_eq!(most_unpacked(u64::MAX, 5), 5);
    }
}
