//! Disk images: the bytes of strangers. Our own reader looks first, then the tools of this machine do, locked in;
//! callers only learn what we say about an image, never what a tool said.

mod format;
pub(crate) mod fresh;
mod qcow2;
mod sandbox;
mod tools;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use muster_types::blob::{Compression, ImageFacts, ImageFormat};
use muster_types::settings::Settings;
use muster_types::{Error, Result};
use serde_json::Map;

use crate::command::Commands;
use crate::storage::{Scratch, failed};
use format::{HEAD, Kind, refuse};
use tools::{Layers, Tools};

/// What may be taken in, in bytes.
#[derive(Debug, Clone, Copy)]
struct Most {
    size: u64,
    virtual_size: u64,
}

/// Looks at images and converts them.
#[derive(Debug)]
pub(crate) struct Images {
    most: Most,
    tools: Result<Tools, String>,
    /// Whether our own reader has the last word, and what is converted stays as it is.
    simulated: bool,
}

/// The files of a disk.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Disk<'a> {
    pub(crate) top: &'a Path,
    pub(crate) base: Option<&'a Path>,
}

/// Work on one image: where it may write, how much, and whether anybody still waits for it.
pub(crate) struct Job {
    pub(crate) scratch: Scratch,
    /// How many more bytes the disk takes.
    pub(crate) room: Box<dyn Fn() -> u64 + Send>,
    pub(crate) given_up: Arc<AtomicBool>,
}

impl Images {
    /// Those of this machine.
    pub(crate) fn new(commands: &Commands, settings: &Settings) -> Self {
        let tools = Tools::find(commands, &settings.image_user);
        Self { most: Most::new(settings), tools, simulated: false }
    }

    /// Those of a simulated node, which takes the tools of this machine for unpacking if it can.
    pub(crate) fn simulated() -> Self {
        let settings = Settings::defaults();
        let tools = Tools::shared(&settings.image_user);
        Self { most: Most::new(&settings), tools, simulated: true }
    }

    /// Why this machine cannot do it.
    pub(crate) fn limit(&self) -> Option<String> {
        self.tools.as_ref().err().map(|why| format!("looking at images needs {why}"))
    }

    fn tools(&self) -> Result<&Tools> {
        self.tools.as_ref().map_err(|why| Error::Unavailable(format!("looking at images needs {why}")))
    }

    /// Says what an image is, or refuses it.
    pub(crate) fn inspect(&self, file: &Path, job: &Job) -> Result<ImageFacts> {
        if self.simulated && self.tools.is_err() {
            return self.facts_of(file);
        }
        let (facts, file) = self.open(file, job)?;
        if !self.simulated {
            let tools = self.tools()?;
            require_whole(&file, job)?;
            tools.require_agreement(&file, &facts, job)?;
            if facts.format == ImageFormat::Qcow2 {
                tools.require_sound(&file, job)?;
                let head = tools.guest_head(&file, job)?;
                if format::may_refer(&head) {
                    return Err(refuse(
                        "the image has an image inside, which could refer to any file of the host",
                    ));
                }
            }
        }
        Ok(facts)
    }

    /// The bytes of an image, unpacked.
    pub(crate) fn unpack(&self, file: &Path, packing: Compression, job: &Job) -> Result<PathBuf> {
        self.tools()?.unpack(file, packing, self.most.size, job)
    }

    /// Makes the image that machines use; nothing if they use the file itself.
    pub(crate) fn convert(&self, file: &Path, facts: &ImageFacts, job: &Job) -> Result<Option<PathBuf>> {
        if self.simulated {
            return Ok(None);
        }
        let tools = self.tools()?;
        let (found, opened) = self.open(file, job)?;
        if found.format != facts.format || found.virtual_size != facts.virtual_size {
            return Err(refuse("the image is not what it was when it was looked at"));
        }
        if facts.format == ImageFormat::Iso {
            return Ok((opened != file).then_some(opened));
        }
        require_whole(&opened, job)?;
        let made = tools.convert(&opened, facts, self.most.size, job)?;
        self.require_made(&made, facts.virtual_size)?;
        Ok(Some(made))
    }

    /// The same for an image that holds only what differs from `base`.
    pub(crate) fn join(&self, file: &Path, base: &Path, job: &Job) -> Result<Option<PathBuf>> {
        if self.simulated {
            return Ok(None);
        }
        let (facts, under) = (self.facts_of(file)?, self.facts_of(base)?);
        if facts.format != ImageFormat::Qcow2 || facts.packing.is_some() {
            return Err(refuse("the image is said to be a part of another and is none"));
        }
        require_whole(file, job)?;
        let layers = Layers { top: file, base: Some((base, under.format)), virtual_size: facts.virtual_size };
        let made = self.tools()?.join(&layers, self.most.size, job)?;
        self.require_made(&made, facts.virtual_size)?;
        Ok(Some(made))
    }

    /// A copy of the disk of a machine that is off: its image, and the one that lies below if there is one.
    pub(crate) fn copy_disk(
        &self,
        disk: &Disk<'_>,
        thin: bool,
        compress: bool,
        job: &Job,
    ) -> Result<PathBuf> {
        let virtual_size = fresh::virtual_size(disk.top).map_err(failed("a disk cannot be looked at"))?;
        let under = disk.base.map(|base| Ok((base, self.facts_of(base)?.format))).transpose()?;
        let layers = Layers { top: disk.top, base: under, virtual_size };
        let made = self.tools()?.copy(&layers, thin, compress, self.most.size, job)?;
        self.require_made(&made, virtual_size)?;
        Ok(made)
    }

    fn require_made(&self, made: &Path, virtual_size: u64) -> Result<()> {
        let found = self.facts_of(made)?;
        if found.format != ImageFormat::Qcow2 || found.virtual_size != virtual_size {
            return Err(Error::Internal("the conversion of an image is not what was asked for".into()));
        }
        Ok(())
    }

    /// What an image is by its first bytes, and where its unpacked bytes are.
    fn open(&self, file: &Path, job: &Job) -> Result<(ImageFacts, PathBuf)> {
        let facts = self.facts_of(file)?;
        let Some(packing) = facts.packing else { return Ok((facts, file.to_owned())) };
        let unpacked = self.unpack(file, packing, job)?;
        let inside = self.facts_of(&unpacked)?;
        if inside.packing.is_some() {
            return Err(refuse("the image is packed twice"));
        }
        Ok((ImageFacts { packing: Some(packing), ..inside }, unpacked))
    }

    /// What a file is by its first bytes.
    pub(crate) fn facts_of(&self, path: &Path) -> Result<ImageFacts> {
        let file = File::open(path).map_err(failed("an image cannot be opened"))?;
        let size = file.metadata().map_err(failed("an image cannot be looked at"))?.len();
        // Disk tools count in sectors.
        let sectors = size.next_multiple_of(512);
        let (format, packing, virtual_size, further) = match format::look(&head(&file)?, size)? {
            Kind::Raw => (ImageFormat::Raw, None, sectors, Map::new()),
            Kind::Iso => (ImageFormat::Iso, None, sectors, Map::new()),
            Kind::Qcow2(image) => (ImageFormat::Qcow2, None, image.virtual_size, image.further()),
            Kind::Packed(packing) => (ImageFormat::Raw, Some(packing), sectors, Map::new()),
        };
        if size > self.most.size {
            return Err(refuse("the image is larger than MAX_IMAGE_SIZE_GB allows"));
        }
        if virtual_size == 0 {
            return Err(refuse("the image has a disk of no size"));
        }
        if virtual_size > self.most.virtual_size {
            return Err(refuse("the image promises a larger disk than MAX_IMAGE_VIRTUAL_SIZE_GB allows"));
        }
        Ok(ImageFacts { format, packing, virtual_size, further })
    }
}

impl Most {
    fn new(settings: &Settings) -> Self {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a limit in bytes")]
        let bytes = |gigabytes: f64| (gigabytes.max(0.0) * f64::from(1 << 30)) as u64;
        Self {
            size: bytes(settings.max_image_size_gb),
            virtual_size: bytes(settings.max_image_virtual_size_gb),
        }
    }
}

/// How a file is packed, if it is.
pub(crate) fn packing(file: &File) -> Result<Option<Compression>> {
    Ok(format::packing(&head(file)?))
}

/// Refuses an image that says where its data is, and does not have it there.
fn require_whole(path: &Path, job: &Job) -> Result<()> {
    let file = File::open(path).map_err(failed("an image cannot be opened"))?;
    let size = file.metadata().map_err(failed("an image cannot be looked at"))?.len();
    match format::look(&head(&file)?, size)? {
        Kind::Qcow2(image) => {
            let most = tools::most_unpacked(size, u64::MAX);
            image.require_whole(&file, size, most, &|| !job.given_up.load(Ordering::Relaxed))
        }
        Kind::Raw | Kind::Iso | Kind::Packed(_) => Ok(()),
    }
}

/// The bytes that tell what a file is.
fn head(file: &File) -> Result<Vec<u8>> {
    let mut head = vec![0; HEAD];
    let mut filled = 0;
    while filled < HEAD {
        match file.read_at(&mut head[filled..], filled as u64) {
            Ok(0) => break,
            Ok(came) => filled += came,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(failed("an image cannot be read")(error)),
        }
    }
    head.truncate(filled);
    Ok(head)
}
